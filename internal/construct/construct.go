// Package construct lets the client call the constructors of its objects. Their packages do not
// export them, because users have no session to pass.
package construct

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/redlatch/redlatch/lock"
)

var constructors = map[reflect.Type]any{}

// Provide makes a constructor available to Of. Packages call it while they are initialized.
func Provide[F any](constructor F) { constructors[reflect.TypeFor[F]()] = constructor }

// Of returns the constructor of type F, which the package of the object provides.
func Of[F any]() F { return constructors[reflect.TypeFor[F]()].(F) }

var errNilOption = errors.New("a nil option")

// Configure calls the options of the object of that name with its settings. It stops at an option
// that is nil or fails, with an error that matches lock.ErrInvalid.
func Configure[S any, O ~func(S) error](settings S, name string, opts []O) error {
	for _, opt := range opts {
		err := errNilOption
		if opt != nil {
			err = opt(settings)
		}
		if err != nil {
			return fmt.Errorf("%w: options of %q: %w", lock.ErrInvalid, name, err)
		}
	}
	return nil
}
