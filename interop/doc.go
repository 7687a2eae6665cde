// Package interop tests redlatch together with other libraries that share its locks: Redisson
// in Java, for every kind of lock, and Go libraries for the plain lock. It is a separate
// module, so that redlatch does not depend on them.
//
// Java runs in separate processes (see src), one for each version of Redisson, which
// execute the commands of the tests. The tests treat both languages as sides with the same
// operations, so each test is written once and runs both ways.
package interop
