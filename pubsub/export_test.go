package pubsub

// Refused returns how many channels the server did not want to subscribe to.
func (h *Hub) Refused() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for ch := range h.homeless {
		if !ch.notBefore.IsZero() {
			n++
		}
	}
	return n
}
