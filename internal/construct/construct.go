// Package construct lets the client call the constructors of its objects. Their packages do not
// export them, because users have no session to pass.
package construct

import "reflect"

var constructors = map[reflect.Type]any{}

// Provide makes a constructor available to Of. Packages call it while they are initialized.
func Provide[F any](constructor F) { constructors[reflect.TypeFor[F]()] = constructor }

// Of returns the constructor of type F, which the package of the object provides.
func Of[F any]() F { return constructors[reflect.TypeFor[F]()].(F) }
