package testserver

// Pause panics: a test that calls it compiles here, and needs another system to run.
func (*Server) Pause() { panic("testserver: Windows cannot stop a process") }

// Resume panics as Pause does.
func (*Server) Resume() { panic("testserver: Windows cannot continue a process") }
