// Package replies has the tests of internal/wire that need servers: what each line of servers replies, and
// what the library makes of it.
package replies
