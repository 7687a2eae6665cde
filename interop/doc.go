// Package interop has tests with the libraries of others whose locks redlatch
// shares: Redisson in Java, for all kinds of lock, and Go libraries for the plain
// lock. It is a module of its own, so that they are none of redlatch's.
//
// Java runs in processes of its own (see redisson/src), one for each version of
// Redisson, which do what the tests tell them. The tests see both languages as
// sides with the same operations, so that each is written once and runs both ways.
package interop
