package pglock_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	cryptorand "crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	pglock "github.com/redlatch/redlatch/contrib/postgres"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// Callers that leave while they read, for themselves and for others, do not disturb a session, also with TLS.
func TestLeavingReaders(t *testing.T) {
	t.Run("plain", func(t *testing.T) {
		t.Parallel()
		leavingReaders(t, commonServer(t), "")
	})
	t.Run("TLS", func(t *testing.T) {
		t.Parallel()
		leavingReaders(t, withTLS(t), "?sslmode=require")
	})
}

func leavingReaders(t *testing.T, s *server, parameters string) {
	pool, err := pgxpool.New(t.Context(), s.url()+parameters)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	c, other := advisory.make(t, pool), advisory.make(t, pool)
	held := acquire(t, c.Lock("readers-held"))
	theirs := acquire(t, other.Lock("readers-theirs"))

	var callers sync.WaitGroup
	for i := range 6 {
		name := fmt.Sprintf("readers-%d", i)
		callers.Go(func() {
			for range harness.Size(100, 1000) {
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(400*time.Microsecond))
				h, err := c.Lock(name).Lock(ctx, lock.Parent(context.Background()))
				cancel()
				if err == nil {
					assert.NoError(t, h.Unlock(t.Context()))
				}
			}
		})
	}
	callers.Go(func() { // on the session of a waiter
		for range harness.Size(10, 50) {
			_, err := c.Lock("readers-theirs").Lock(t.Context(), lock.Wait(rand.N(10*time.Millisecond)))
			assert.Error(t, err)
		}
	})
	callers.Wait()

	require.NoError(t, held.Context().Err(), "a session was lost")
	require.NoError(t, held.Unlock(t.Context()))
	waiting := harness.StartLock(t, t.Context(), c.Lock("readers-theirs"))
	require.NoError(t, theirs.Unlock(t.Context()))
	require.NoError(t, waiting.End())
	require.NoError(t, waiting.Value.Unlock(t.Context()))
	for i := range 6 {
		name := fmt.Sprintf("readers-%d", i)
		harness.Eventually(t, soon, "nothing is left", func() bool { return len(left(t, s, name)) == 0 })
	}
}

// stuck is a connection whose writes block while its mutex is locked.
type stuck struct {
	net.Conn
	mu      *sync.Mutex
	blocked *atomic.Bool
}

func (c stuck) Write(b []byte) (int, error) {
	c.blocked.Store(!c.mu.TryLock())
	if c.blocked.Load() {
		c.mu.Lock()
	}
	defer c.mu.Unlock()
	return c.Conn.Write(b)
}

// A request that blocks while it is sent does not keep the client from seeing until when other holds last.
func TestRemainingBesideBlockedRequest(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig(commonServer(t).url())
	require.NoError(t, err)
	var mu sync.Mutex
	var blocked atomic.Bool
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, addr)
		return stuck{conn, &mu, &blocked}, err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	c := advisory.make(t, pool, pglock.TTL(time.Minute))
	h := acquire(t, c.Lock("beside-blocked"))

	mu.Lock()
	unlock := sync.OnceFunc(mu.Unlock)
	defer unlock()
	request := harness.Start(t, t.Context(), func(ctx context.Context) (struct{}, error) { return struct{}{}, h.Extend(ctx, time.Minute) })
	harness.Eventually(t, soon, "the request blocks", blocked.Load)
	remaining := harness.Start(t, t.Context(), func(context.Context) (time.Duration, error) { return h.Remaining(), nil })
	require.NoError(t, remaining.EndWithin(pause))
	require.Positive(t, remaining.Value)
	unlock()
	require.NoError(t, request.End())
	require.NoError(t, h.Unlock(t.Context()))
}

// withTLS returns a server that takes connections with TLS.
func withTLS(t *testing.T) *server {
	t.Helper()
	s := ownServer(t)
	key, err := ecdsa.GenerateKey(elliptic.P256(), cryptorand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(cryptorand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	keyBytes, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	for name, block := range map[string]*pem.Block{
		"server.crt": {Type: "CERTIFICATE", Bytes: cert}, "server.key": {Type: "PRIVATE KEY", Bytes: keyBytes},
	} {
		require.NoError(t, os.WriteFile(filepath.Join(s.data(), name), pem.EncodeToMemory(block), 0o600))
	}
	config, err := os.OpenFile(filepath.Join(s.data(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = config.WriteString("ssl = on\n")
	require.NoError(t, err)
	require.NoError(t, config.Close())
	s.stop(syscall.SIGINT)
	require.NoError(t, s.start())
	return s
}
