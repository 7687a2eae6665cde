// Package pubsub has the settings and numbers of the channels on which a client hears of releases.
//
// All objects of a client share one connection that subscribes, or one per primary with sharded pub/sub, and
// all waiters for a lock share one subscription. Messages are hints and may be lost, so waiters also poll at intervals. No
// operation fails because of pub/sub: if the connection is down or subscribing is forbidden, the client keeps trying
// while its waiters poll.
package pubsub

// Mode is a kind of pub/sub. Messages of one kind do not reach subscribers of the other, so all
// processes on a server must use the same.
type Mode uint8

const (
	// Auto is Sharded in a cluster whose nodes support sharded pub/sub (Redis and
	// Valkey from 7.0), and Plain everywhere else, which is Redisson's default.
	Auto Mode = iota
	// Sharded uses SPUBLISH and SSUBSCRIBE.
	Sharded
	// Plain uses PUBLISH and SUBSCRIBE.
	Plain
)

// String returns "auto", "sharded" or "plain".
func (m Mode) String() string {
	if m > Plain {
		m = Auto
	}
	return [...]string{Auto: "auto", Sharded: "sharded", Plain: "plain"}[m]
}

// Stats is a snapshot of the channels of a client, for debugging and metrics.
type Stats struct {
	Listeners   int    // open subscriptions
	Channels    int    // channels with a listener or kept warm
	Subscribed  int    // channels confirmed by the server
	Refused     int    // channels that the server has refused to subscribe; the client asks again after a pause
	Connections int    // live subscriber connections
	Messages    uint64 // messages received in total
	Reconnects  uint64 // lost connections that were replaced
}
