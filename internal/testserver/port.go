package testserver

import (
	"fmt"
	"math/rand/v2"
	"net"
)

// FreePorts returns n ports of the loopback interface that nobody uses. The system gives them to no connection, so a server
// finds its port free when it is started again.
func FreePorts(n int) (ports []int, err error) {
	const least, most = 12_000, 32_000 // connections begin at 32,768
	for tries := 100 * n; len(ports) < n && tries > 0; tries-- {
		var l net.Listener
		port := least + rand.IntN(most-least)
		if l, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			defer l.Close() // at the end, so that no port comes twice
			ports = append(ports, port)
		}
	}
	if len(ports) < n {
		return nil, fmt.Errorf("no port is free: %w", err)
	}
	return ports, nil
}
