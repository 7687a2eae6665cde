package redlatch

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// HoldInfo describes a lock or permit that a client holds, or a call that waits for one.
type HoldInfo struct {
	// Kind is the kind of object, as in logs and telemetry: "lock", "fair" or "permit-semaphore",
	// for example.
	Kind string
	// Name is the name that was passed to the client, or the names of the members of a group.
	Name string
	// Owner is the id under which the server has the lock, or the id of a permit. Anyone who
	// knows the id of a permit can release it. A group has the owner that the caller named. Of a
	// call that waits it may be "".
	Owner string
	// Waiting is set for a call that waits.
	Waiting bool
	// Since is when Lock returned the hold, or when the wait began.
	Since time.Time
	// Remaining is the result of the hold's Remaining: lock.NoExpiry if a permit never expires. It is
	// 0 for a call that waits.
	Remaining time.Duration
	// Site is the function and the line that called Lock, TryLock, Do, Acquire, Campaign, Run or
	// Wait, or that set up the adapter that did (lock.Site).
	Site string
}

// Holds returns what this client holds and waits for, the oldest first. It sends nothing and does not
// block. Its cost grows with the number of locks that the client holds or waits for. A hold is
// included from when its caller gets it until Unlock, or until it is lost.
//
// A group of locks is one hold, of the client that created it; the holds of its members are not
// listed. A call that waits for a group of locks waits for one of the members, which is listed
// instead of it, by the client of that member. Permits of a Semaphore have no holder and are not
// listed, but calls that wait for them are. A call whose first attempt has no answer yet does not
// wait (see Stats).
func (c *Client) Holds() []HoldInfo {
	var all []HoldInfo
	for h := range c.s.Holds() {
		if h.Site.IsZero() {
			continue
		}
		all = append(all, HoldInfo{
			Kind: h.Kind, Name: h.Name, Owner: h.Owner, Waiting: h.Waiting, Since: h.Since, Remaining: h.Remaining,
			Site: h.Site.String(),
		})
	}

	slices.SortFunc(all, func(a, b HoldInfo) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Owner, b.Owner))
	})
	return all
}

// DebugHandler returns a handler that shows the result of Holds, for a debug port that users cannot
// reach. It answers with a table for people, or with JSON if the request accepts application/json or
// has the parameter format=json: an array of objects with the fields kind, name, owner, waiting,
// since, seconds, remaining_seconds and site. A permit that never expires has no remaining_seconds,
// and neither has a call that waits.
func (c *Client) DebugHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		holds := c.Holds()
		if r.URL.Query().Get("format") == "json" || strings.Contains(r.Header.Get("Accept"), "application/json") {
			w.Header().Set("Content-Type", "application/json")
			writeJSON(w, holds)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		writeTable(w, c.ID(), holds)
	})
}

// writeJSON writes holds for programs. The error of a client that has gone is of no interest.
func writeJSON(w http.ResponseWriter, holds []HoldInfo) {
	type object struct {
		Kind      string    `json:"kind"`
		Name      string    `json:"name"`
		Owner     string    `json:"owner,omitempty"`
		Waiting   bool      `json:"waiting"`
		Since     time.Time `json:"since"`
		Seconds   float64   `json:"seconds"`
		Remaining *float64  `json:"remaining_seconds,omitempty"`
		Site      string    `json:"site"`
	}
	objects := make([]object, len(holds))
	for i, h := range holds {
		objects[i] = object{
			Kind: h.Kind, Name: h.Name, Owner: h.Owner, Waiting: h.Waiting, Since: h.Since,
			Seconds: time.Since(h.Since).Seconds(), Site: h.Site,
		}
		if remaining := h.Remaining.Seconds(); !h.Waiting && h.Remaining >= 0 {
			objects[i].Remaining = &remaining
		}
	}

	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(objects)
}

// writeTable writes holds for people.
func writeTable(w http.ResponseWriter, client string, holds []HoldInfo) {
	waiting := 0
	for _, h := range holds {
		if h.Waiting {
			waiting++
		}
	}

	fmt.Fprintf(w, "client %s: %d held, %d waiting\n\n", client, len(holds)-waiting, waiting)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "STATE\tFOR\tREMAINING\tKIND\tNAME\tOWNER\tSITE")
	for _, h := range holds {
		state := "held"
		remaining := h.Remaining.Round(time.Millisecond).String()
		if h.Waiting {
			state = "waiting"
			remaining = "-"
		} else if h.Remaining < 0 {
			remaining = "forever"
		}
		fmt.Fprintf(table, "%s\t%v\t%s\t%s\t%q\t%s\t%s\n",
			state, time.Since(h.Since).Round(time.Millisecond), remaining, h.Kind, h.Name, cmp.Or(h.Owner, "-"), h.Site)
	}

	_ = table.Flush()
}
