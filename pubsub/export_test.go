package pubsub

// Refused returns the number of channels whose subscription the server has refused.
func (h *Hub) Refused() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for ch := range h.unassigned {
		if !ch.notBefore.IsZero() {
			n++
		}
	}
	return n
}
