package wire

import (
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Form is a form of the keys or channels that belong to an object, beside the key that is its name.
type Form struct {
	// Kinds are the kinds of objects with such a key, in the words of the command redlatch. An object that
	// has only this key is of the first kind.
	Kinds []string
	// Type is the type of the key, as TYPE returns it. A channel has none.
	Type string
	// Of returns the key of an object. If Rest is not empty, it is only the beginning.
	Of func(name string) string
	// Rest is a pattern of what follows that beginning, such as an id.
	Rest string
}

// Role is the purpose of a key or channel.
type Role int

// The roles. Those whose keys have an id at the end come first, because a name may look like one.
const (
	RoleFairChannel Role = iota
	RoleReadHold
	RoleSemaphoreRequests
	RoleLatchReply
	RoleRateValueOf
	RoleRatePermitsOf
	RoleRateReply
	RoleOnceRun
	RoleOnceDone

	RoleFencingToken
	RoleFairQueue
	RoleFairTimeouts
	RoleFairAlive
	RoleFairOrder
	RoleWriterWaits
	RoleSemaphoreCreated
	RoleSemaphoreWaiting
	RoleSemaphoreAlive
	RolePermitTimeouts
	RoleLatchRound
	RoleRateValue
	RoleRatePermits
	RoleRateTurn
	RoleElectionTerm

	RoleLockChannel
	RoleRWChannel
	RoleSemaphoreChannel
	RoleLatchChannel
	RoleRateChannel
	RolePlainChannel
	RoleElectionChannel
	numRoles
)

const (
	clientPattern = `[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}`
	ownerPattern  = clientPattern + `:[0-9]+`
	slotPattern   = `[^:]+`
)

// Forms are the forms of all keys and channels that redlatch uses for objects, by their roles.
// ServerMark belongs to no object.
var Forms = [numRoles]Form{
	RoleFairChannel:       {[]string{"fair", "election"}, "", beginning(LockChannel), ownerPattern},
	RoleReadHold:          {[]string{"rwlock"}, "string", ReadHoldTimeouts, ownerPattern + `:rwlock_timeout:[0-9]+`},
	RoleSemaphoreRequests: {[]string{"semaphore"}, "hash", beginning(semaphoreRequests), clientPattern},
	RoleLatchReply:        {[]string{"latch"}, "string", beginning(LatchRound), `[0-9a-f]{32}`},
	RoleRateValueOf:       {[]string{"rate"}, "string", beginning(RateValue), clientPattern},
	RoleRatePermitsOf:     {[]string{"rate"}, "zset", beginning(RatePermits), clientPattern},
	RoleRateReply:         {[]string{"rate"}, "string", beginning(rateReply), `[0-9a-f]{32}`},
	RoleOnceRun:           {[]string{"once"}, "hash", beginning(onceRuns), slotPattern},
	RoleOnceDone:          {[]string{"once"}, "string", beginning(onceDones), slotPattern},

	RoleFencingToken:     {[]string{"fenced", "fair"}, "string", FencingToken, ""}, // fair: a queue and a token
	RoleFairQueue:        {[]string{"fair", "election"}, "list", FairQueue, ""},
	RoleFairTimeouts:     {[]string{"fair", "election"}, "zset", FairTimeouts, ""},
	RoleFairAlive:        {[]string{"fair", "election"}, "zset", FairAlive, ""},
	RoleFairOrder:        {[]string{"fair", "election"}, "zset", FairOrder, ""},
	RoleWriterWaits:      {[]string{"rwlock"}, "set", WriterWaits, ""},
	RoleSemaphoreCreated: {[]string{"semaphore"}, "string", SemaphoreCreated, ""},
	RoleSemaphoreWaiting: {[]string{"semaphore"}, "zset", SemaphoreWaiting, ""},
	RoleSemaphoreAlive:   {[]string{"semaphore"}, "zset", SemaphoreAlive, ""},
	RolePermitTimeouts:   {[]string{"semaphore"}, "zset", PermitTimeouts, ""},
	RoleLatchRound:       {[]string{"latch"}, "string", LatchRound, ""},
	RoleRateValue:        {[]string{"rate"}, "string", RateValue, ""},
	RoleRatePermits:      {[]string{"rate"}, "zset", RatePermits, ""},
	RoleRateTurn:         {[]string{"rate"}, "string", RateTurn, ""},
	RoleElectionTerm:     {[]string{"election"}, "hash", ElectionTerm, ""},

	RoleLockChannel:      {[]string{"lock", "fenced", "fair", "election", "once", "group"}, "", LockChannel, ""},
	RoleRWChannel:        {[]string{"rwlock"}, "", RWChannel, ""},
	RoleSemaphoreChannel: {[]string{"semaphore"}, "", SemaphoreChannel, ""},
	RoleLatchChannel:     {[]string{"latch"}, "", LatchChannel, ""},
	RoleRateChannel:      {[]string{"rate"}, "", RateChannel, ""},
	RolePlainChannel:     {[]string{"plain"}, "", PlainChannel, ""},
	RoleElectionChannel:  {[]string{"election"}, "", ElectionChannel, ""},
}

// beginning returns the function for keys that consist of a key, a colon and an id.
func beginning(key func(name string) string) func(name string) string {
	return func(name string) string { return key(name) + ":" }
}

// Key is a key or channel of an object, in its parts.
type Key struct {
	Role Role
	Name string // the key that is the name of the object
	Rest string // what follows the name, such as an id
}

// Form returns the form of the key.
func (k Key) Form() Form { return Forms[k.Role] }

// Slot returns the slot of once-only work if the key is of one.
func (k Key) Slot() (slot string, ok bool) {
	if k.Role != RoleOnceRun && k.Role != RoleOnceDone {
		return "", false
	}
	slot, err := url.QueryUnescape(k.Rest)
	return slot, err == nil
}

// pattern matches the keys of a form, and captures the name and the rest.
type pattern struct {
	before  string
	matches *regexp.Regexp
}

// patterns returns the patterns of each form: of names without a brace, and with one.
var patterns = sync.OnceValue(func() (all [numRoles][2]pattern) {
	const name = "\x00"
	for role, form := range Forms {
		for i, like := range []struct{ name, expression string }{{name, `([^{]+)`}, {"{" + name, `([^{]*\{.*)`}} {
			before, after, _ := strings.Cut(form.Of(like.name), like.name)
			all[role][i] = pattern{before, regexp.MustCompile(
				`(?s)\A` + regexp.QuoteMeta(before) + like.expression + regexp.QuoteMeta(after) + "(" + form.Rest + `)\z`)}
		}
	}
	return all
})

// ParseKey returns the parts of a helper key or a channel of an object. Of two names with the same key, such
// as "a" and "{a}", it returns the one without braces.
func ParseKey(key string) (k Key, ok bool) {
	for role, both := range patterns() {
		for _, p := range both {
			if !strings.HasPrefix(key, p.before) {
				continue
			}
			if parts := p.matches.FindStringSubmatch(key); parts != nil {
				return Key{Role(role), parts[1], parts[2]}, true
			}
		}
	}
	return Key{}, false
}

// OnceDoneValue is the value of the key OnceDone: the owner that has done the work, and when, by its clock.
func OnceDoneValue(owner lock.Owner, at time.Time) string {
	return owner.String() + " " + strconv.FormatInt(at.UnixMilli(), 10)
}

// ParseOnceDone returns the parts of such a value. The time is zero if there is none.
func ParseOnceDone(value string) (owner string, at time.Time) {
	owner, text, _ := strings.Cut(value, " ")
	if ms, err := strconv.ParseInt(text, 10, 64); err == nil {
		at = time.UnixMilli(ms)
	}
	return owner, at
}
