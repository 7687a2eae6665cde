package etcdlock

import (
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// Waited returns the error of a wait that is over, after that error of a renewal.
func Waited(c *Client, renewal error) error {
	c.s.mu.Lock()
	l := c.s.session
	l.err = renewal
	c.s.mu.Unlock()
	return c.s.waited(l)
}

// Driver returns the driver of a client, and a function that ends the lease of its session, as when etcd is silent.
func Driver(c *Client) (d driver.Driver, expire func()) {
	return c.s, func() {
		c.s.mu.Lock()
		defer c.s.mu.Unlock()
		c.s.endLocked(c.s.session, lock.ReasonExpired, nil)
	}
}
