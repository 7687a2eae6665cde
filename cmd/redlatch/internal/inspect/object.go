package inspect

import (
	"bytes"
	"encoding/json"
	"strings"
	"time"
)

// Kind is the kind of an object, as far as its keys show it.
type Kind string

// The kinds. A fair lock for which nobody waits has the keys of a lock.
const (
	None      Kind = "none"      // no key of that name exists
	Lock      Kind = "lock"      // reentrant, non-reentrant or spin lock
	Fenced    Kind = "fenced"    // fenced lock
	Fair      Kind = "fair"      // fair lock
	RWLock    Kind = "rwlock"    // read-write lock
	Plain     Kind = "plain"     // lock in a string, also of other libraries
	Semaphore Kind = "semaphore" // of either kind: while no permit is held, both have the same keys
	Latch     Kind = "latch"     // count-down latch
	Counter   Kind = "counter"   // an integer: a semaphore, a latch, or neither
	Election  Kind = "election"  // leader election
	Once      Kind = "once"      // slot of once-only work
	Rate      Kind = "rate"      // rate limiter
	Group     Kind = "group"     // group of values that are locked each by itself or several at once
	Other     Kind = "other"     // no object of redlatch or Redisson
)

// WithArticle returns a noun, such as the name of a kind, after its indefinite article.
func WithArticle(noun string) string {
	if strings.ContainsRune("aeio", rune(noun[0])) {
		return "an " + noun
	}
	return "a " + noun
}

// Object is what the server knows of a name.
type Object struct {
	Name string    `json:"name"`
	Key  string    `json:"key"`
	Type string    `json:"type,omitempty"` // of the main key, empty if it does not exist
	Kind Kind      `json:"kind"`
	At   time.Time `json:"at"` // by the server's clock
	// Held is set if it is known that someone holds the lock or a permit, or leads.
	Held bool `json:"held"`
	// Expires is when the main key expires: the lease of a lock, or else the memory of a slot that is done. It is
	// nil if there is none.
	Expires *Millis `json:"expires_ms,omitempty"`

	Holders []Holder `json:"holders,omitempty"`
	Queue   []Waiter `json:"queue,omitempty"` // of a fair lock, the first first

	Token   *int64         `json:"token,omitempty"` // the last fencing token
	Permits *PermitNumbers `json:"permits,omitempty"`
	Count   *int64         `json:"count,omitempty"` // of a latch or a counter
	Leader  *Term          `json:"term,omitempty"`  // the last term of an election
	Slot    *Slot          `json:"slot,omitempty"`  // of once-only work
	Limit   *Limit         `json:"limit,omitempty"` // of a rate limiter
	// Waiting is the number of waiting writers of a read-write lock, or of the clients in the wait
	// queue of a semaphore.
	Waiting int `json:"waiting,omitempty"`
	// Subscribers is the number of connections that wait for a message, -1 if unknown.
	Subscribers int `json:"subscribers"`
	// Truncated is set if the object has more holders, waiters or permits than were read.
	Truncated bool `json:"truncated,omitempty"`
	// Unidentified is why owners without a connection may have one, empty if all connections are known.
	Unidentified string    `json:"unidentified,omitempty"`
	Anomalies    []Anomaly `json:"anomalies,omitempty"`
}

// KnowsHolders reports whether the holders of the object are known, also if there are none. The holders of
// permits without ids are unknown, and so are the holders of a key that may be no object.
func (o Object) KnowsHolders() bool {
	switch o.Kind {
	case Semaphore:
		return o.Permits != nil && o.Permits.Held >= 0
	case Plain:
		return o.Held // else its value was left out
	case Counter, Rate, Other:
		return false
	}
	return true
}

// MarshalJSON implements json.Marshaler. What is not known of the holders is null.
func (o Object) MarshalJSON() ([]byte, error) {
	type bare Object // without this method
	shown := struct {
		bare
		Held    *bool    `json:"held"`
		Holders []Holder `json:"holders"`
	}{bare: bare(o)}
	if o.KnowsHolders() {
		shown.Held, shown.Holders = &o.Held, append([]Holder{}, o.Holders...)
	}

	// The caller decides what is escaped.
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	err := e.Encode(shown)
	return out.Bytes(), err
}

// Millis is a duration, in JSON a number of milliseconds.
type Millis time.Duration

// MarshalJSON implements json.Marshaler.
func (m Millis) MarshalJSON() ([]byte, error) {
	return json.Marshal(time.Duration(m).Milliseconds())
}

// String implements fmt.Stringer.
func (m Millis) String() string {
	d := time.Duration(m)
	switch {
	case d.Abs() >= time.Minute:
		return d.Round(time.Second).String()
	case d.Abs() >= time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.String()
}

// Owner is the id of a holder or waiter.
type Owner struct {
	ID string `json:"id"`
	// Client is the id of the client, and Number that of its claim, or of a thread in Java. They
	// are zero if ID has another form.
	Client string `json:"client,omitempty"`
	Number uint64 `json:"number,omitempty"`
	// Library is "redlatch", "Redisson" or "other". It is empty for permits, whose ids do not tell it.
	Library string `json:"library,omitempty"`
	// Started is when a client of redlatch was created, by the clock of its machine.
	Started *time.Time `json:"client_started,omitempty"`
	// Connection describes the connections of a client of redlatch. Identify sets it. It is nil if no connection
	// has the name that redlatch gives it.
	Connection *Connection `json:"connection,omitempty"`
}

// ownLibrary is the Library of this module.
const ownLibrary = "redlatch"

// IsLost reports whether the owner, after Identify, should have a connection and has none.
func (o Owner) IsLost() bool { return o.Library == ownLibrary && o.Connection == nil }

// Holder is an owner that holds a lock, or a permit.
type Holder struct {
	Owner
	Mode  string `json:"mode,omitempty"`  // of a read-write lock: read or write
	Count int64  `json:"count,omitempty"` // of holds
	// Values is the number of values of a group that the owner has.
	Values int `json:"values,omitempty"`
	// Lease is the time left, nil without an expiry. It is not positive if it is over.
	Lease *Millis `json:"lease_ms,omitempty"`
}

// Waiter is an owner in the queue of a fair lock.
type Waiter struct {
	Owner
	// Alive is how long its last heartbeat keeps its position, nil if it sends none, as those of
	// Redisson.
	Alive *Millis `json:"alive_ms,omitempty"`
	// Deadline is the time until Redisson drops it, nil if never.
	Deadline *Millis `json:"deadline_ms,omitempty"`
	// Listens is set if a connection has subscribed to its channel. Clients of redlatch do so only
	// for the first of their waiters.
	Listens bool `json:"listens"`
}

// PermitNumbers are the numbers of permits.
type PermitNumbers struct {
	Free int64 // expired permits included
	Held int   // -1 if the server does not know, as of permits without ids
}

// MarshalJSON implements json.Marshaler. An unknown number is null.
func (n PermitNumbers) MarshalJSON() ([]byte, error) {
	shown := struct {
		Free int64 `json:"free"`
		Held *int  `json:"held"`
	}{Free: n.Free}
	if n.Held >= 0 {
		shown.Held = &n.Held
	}
	return json.Marshal(shown)
}

// Limit is the configuration of a rate limiter, and what is used of it.
type Limit struct {
	Rate      int64  `json:"rate"`
	Per       Millis `json:"per_ms"`
	PerClient bool   `json:"per_client"` // each client has the rate for itself
	// Used is the number of permits acquired in the last interval, and NextFree the time until the first of them
	// comes back. They are nil if each client has its own.
	Used     *int64  `json:"used,omitempty"`
	NextFree *Millis `json:"next_free_ms,omitempty"`
}

// Size is the number of all permits, if it is known how many are held.
func (n PermitNumbers) Size() int64 { return n.Free + int64(n.Held) }

// Term is a term of an election.
type Term struct {
	Token   int64  `json:"token"`
	Value   string `json:"value"`
	Current bool   `json:"current"` // it has not ended
}

// Slot is a slot of once-only work. Its holder runs the work.
type Slot struct {
	Work string `json:"work"` // the name of the Once
	Slot string `json:"slot"`
	Done *Done  `json:"done,omitempty"` // nil if the work has not been done
}

// Done is the memory of a slot whose work has been done.
type Done struct {
	By    Owner      `json:"by"`
	Since *time.Time `json:"since,omitempty"` // by the clock of the machine that has done the work
	// Left is the time for which the server remembers it, nil without an end.
	Left *Millis `json:"left_ms,omitempty"`
}

// Anomaly is a state that the library does not leave behind, or that keeps waiters out.
type Anomaly struct {
	Code string `json:"code"`
	Text string `json:"text"`
}
