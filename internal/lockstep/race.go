//go:build race

package lockstep

const race = true
