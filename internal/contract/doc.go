// Package contract has no code: its tests show that every kind of lock, semaphore and
// latch keeps the promises that package lock makes.
// The table of kinds is in kinds_test.go. What only one kind promises is tested in its
// package.
package contract
