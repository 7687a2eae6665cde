package pglock

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Configure prepares a connection like the connection of a session.
func Configure(ctx context.Context, pool *pgxpool.Pool, ttl time.Duration, conn *pgx.Conn) error {
	return dialer{pool, ttl}.configure(ctx, conn)
}
