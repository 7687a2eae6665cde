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

// HeardElsewhere has a message arrive on a connection that is not the channel's.
func (h *Hub) HeardElsewhere(channel, payload string) { (&feed{hub: h}).deliver(channel, payload) }
