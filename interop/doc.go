// Package interop has tests with the libraries of others whose locks redlatch
// shares. It is a module of its own, so that they are none of redlatch's.
package interop
