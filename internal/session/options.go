package session

import (
	"errors"
	"fmt"

	"github.com/redlatch/redlatch/lock"
)

var errNilOption = errors.New("a nil option")

// Configure calls the options of an object with its settings. It stops at an option that is nil or
// fails, with an error that matches lock.ErrInvalid.
func Configure[S any, O ~func(S) error](settings S, opts []O) error {
	for _, opt := range opts {
		err := errNilOption
		if opt != nil {
			err = opt(settings)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", lock.ErrInvalid, err)
		}
	}

	return nil
}
