package main

import (
	"context"

	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/wire"
)

// nameDenied adds to the error of a request about objects of a kind the keys that the user may not access. It
// returns other errors as they are.
func (c *connection) nameDenied(ctx context.Context, err error, kind inspect.Kind, names ...string) error {
	if err == nil || !wire.IsDenied(err) {
		return err
	}
	r, connectErr := c.reader()
	if connectErr != nil {
		return err
	}
	defer r.Conn.Close()
	return r.NameDenied(ctx, err, kind, names...)
}
