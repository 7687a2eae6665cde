package main

import (
	"context"
	"net"
	"time"
)

// far returns the addresses of proxies that delay what passes through them by half of a round trip in each
// direction, until ctx is done.
func far(ctx context.Context, addrs []string, trip time.Duration) ([]string, error) {
	proxies := make([]string, len(addrs))
	for i, addr := range addrs {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		context.AfterFunc(ctx, func() { _ = listener.Close() })
		proxies[i] = listener.Addr().String()
		go func() {
			for {
				client, err := listener.Accept()
				if err != nil {
					return
				}
				server, err := net.Dial("tcp", addr)
				if err != nil {
					_ = client.Close()
					return
				}
				go pass(client, server, trip/2)
				go pass(server, client, trip/2)
			}
		}()
	}
	return proxies, nil
}

// pass copies from one connection to the other, later by a delay, and closes both at the end.
func pass(to, from net.Conn, delay time.Duration) {
	type packet struct {
		text []byte
		due  time.Time
	}
	under := make(chan packet, 1<<12)
	go func() {
		defer close(under)
		for {
			text := make([]byte, 32<<10)
			n, err := from.Read(text)
			if err != nil {
				return
			}
			under <- packet{text[:n], time.Now().Add(delay)}
		}
	}()
	defer from.Close()
	defer to.Close()
	for p := range under {
		time.Sleep(time.Until(p.due))
		if _, err := to.Write(p.text); err != nil {
			return
		}
	}
}
