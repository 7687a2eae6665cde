// Package system tests what clients do with servers: connections, failovers, rights, names, telemetry, and how all of it
// scales. The tests use the public API.
package system
