package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/probe"
)

// probeKinds are the values of --kind, in the order of the checklist.
var probeKinds = []struct{ flag, kind, objects string }{
	{"lock", "", "locks"},
	{"fair", probe.KindFair, "fair locks"},
	{"read-write", probe.KindReadWrite, "read-write locks"},
	{"semaphore", probe.KindSemaphore, "semaphores"},
	{"latch", probe.KindLatch, "latches"},
	{"plain", probe.KindPlain, "plain locks"},
	{"election", probe.KindElection, "elections"},
	{"once", probe.KindOnce, "once-only work"},
	{"rate", probe.KindRate, "rate limiters"},
	{"group", probe.KindGroup, "group locks"},
}

func probeKindFlags() (flags []string) {
	for _, k := range probeKinds {
		flags = append(flags, k.flag)
	}
	return flags
}

// probeCommand is "redlatch probe".
type probeCommand struct {
	connection *connection

	kinds []string
	json  bool
}

func newProbe(c *connection) *cobra.Command {
	p := &probeCommand{connection: c}
	cmd := &cobra.Command{
		Use:   "probe NAME...",
		Short: "Check whether the server suits locks, and the user's rights",
		Long: `Check each node of the server, and whether the user of the URL may use locks and other objects of
these names there. It changes nothing on the server.

The output is a checklist for each node. A check is ok, wrong, missing (rights), or unknown if the
server does not tell. The ACL SETUSER line below a check allows what is missing. It is for a
session of redis-cli or valkey-cli whose user is an administrator, on each node; a shell would
interpret it. An asterisk in NAME stands for any text, so that 'app:*' yields rules for all names
with that beginning. Some rights can be checked only if the user has others: run the command again
after a change.

All objects use the rights of locks, except for latches and semaphores. Elections also use those of
fair locks. --kind limits the check to what a program uses.

` + statusHelpOf("all checks are ok or unknown", "something is wrong or missing"),
		Example: `  redlatch probe --url redis://app:secret@db:6379 orders

  # The rights for all names that begin with app:, without elections and the like.
  redlatch probe --kind lock,fair 'app:*'

  # Only what is missing, for a program.
  redlatch probe --json orders | jq '.nodes[].checks[] | select(.state != "ok")'`,
		Args:                  arguments(1, 1000),
		ValidArgsFunction:     cobra.NoFileCompletions,
		DisableFlagsInUseLine: true,
		RunE:                  p.run,
	}
	f := cmd.Flags()
	f.StringSliceVar(&p.kinds, "kind", nil, "kinds of objects: "+strings.Join(probeKindFlags(), ", ")+" (default: all)")
	f.BoolVar(&p.json, "json", false, "print JSON")
	_ = cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions(probeKindFlags(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// States of a check.
const (
	stateOK      = "ok"
	stateWrong   = "wrong"
	stateMissing = "missing"
	stateUnknown = "unknown"
)

// check is a line of the checklist.
type check struct {
	Check   string   `json:"check"`
	State   string   `json:"state"`
	Detail  string   `json:"detail,omitempty"`
	Advice  string   `json:"advice,omitempty"`
	Missing []string `json:"missing,omitempty"`
	ACL     string   `json:"acl,omitempty"` // the command that allows what is missing
}

type checklist struct {
	Addr    string  `json:"addr"`
	Server  string  `json:"server,omitempty"`
	Version string  `json:"version,omitempty"`
	Replica bool    `json:"replica"`
	Checks  []check `json:"checks"`
}

func (p *probeCommand) run(_ *cobra.Command, args []string) error {
	for _, kind := range p.kinds {
		if err := checkKind(kind, probeKindFlags()); err != nil {
			return err
		}
	}
	opt, err := p.connection.options()
	if err != nil {
		return err
	}
	user := cmp.Or(opt.Username, "default")
	return p.connection.do(func(ctx context.Context, client *redlatch.Client) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		report, err := client.Probe(ctx, args...)
		if len(report.Nodes) == 0 && err != nil {
			return err
		}
		lists := p.lists(report, user)
		if printErr := p.print(os.Stdout, lists); printErr != nil {
			return printErr
		}
		if err != nil {
			return err // of the nodes that did not answer
		}
		for _, list := range lists {
			for _, c := range list.Checks {
				if c.State == stateWrong || c.State == stateMissing {
					return exit{status: statusNo}
				}
			}
		}
		return nil
	})
}

func (p *probeCommand) lists(report probe.Report, user string) (lists []checklist) {
	for _, n := range report.Nodes {
		found := slices.DeleteFunc(slices.Clone(report.Findings), func(f probe.Finding) bool { return f.Addr != n.Addr })
		l := checklist{Addr: n.Addr, Server: n.Server, Version: n.Version, Replica: n.Replica}
		l.Checks = serverChecks(n, found, user)
		l.Checks = append(l.Checks, p.rightsChecks(n, found, user)...)
		lists = append(lists, l)
	}
	return lists
}

// serverChecks returns the checks of a node that concern all users.
func serverChecks(n probe.Node, found []probe.Finding, user string) (checks []check) {
	for _, c := range []struct {
		check  probe.Check
		known  bool
		detail string
		right  string // without which it is unknown
	}{
		{probe.CheckVersion, n.Version != "", n.Server + " " + n.Version, "+info"},
		{probe.CheckEviction, n.EvictionPolicy != "", n.EvictionPolicy, "+info"},
		{probe.CheckClock, n.ClockOffset != 0, fmt.Sprintf("%v off", n.ClockOffset.Abs().Round(time.Microsecond)), "+time"},
	} {
		line := check{Check: string(c.check), State: stateOK, Detail: c.detail}
		if !c.known {
			line = check{Check: string(c.check), State: stateUnknown, Detail: "the user may not ask for it", ACL: setUser(user, []string{c.right})}
		}
		for _, f := range found {
			if f.Check == c.check {
				line = check{Check: string(c.check), State: stateWrong, Detail: f.Problem, Advice: f.Advice}
			}
		}
		checks = append(checks, line)
	}
	return checks
}

// rightsChecks returns the checks of the rights for the kinds of objects.
func (p *probeCommand) rightsChecks(n probe.Node, found []probe.Finding, user string) (checks []check) {
	scripts := slices.IndexFunc(found, func(f probe.Finding) bool { return slices.Contains(f.Rules, "+eval") })
	for _, k := range probeKinds {
		if len(p.kinds) > 0 && !slices.Contains(p.kinds, k.flag) {
			continue
		}
		line := check{Check: k.objects, State: stateOK}
		switch {
		case scripts >= 0:
			line.State, line.Detail = stateUnknown, "the user may not run scripts"
		case !n.RightsKnown:
			line.State, line.Detail = stateUnknown, "the server cannot check rights"
		}
		checks = append(checks, line)
		for _, f := range found {
			if f.Check == probe.CheckCommands && f.Kind == k.kind && scripts < 0 {
				// An unsupported command is a finding of its own.
				if at := &checks[len(checks)-1]; at.State == stateOK {
					*at = missing(k.objects, f, user)
				} else {
					checks = append(checks, missing(k.objects, f, user))
				}
			}
		}
	}
	if scripts >= 0 {
		checks = slices.Insert(checks, 0, missing("scripts", found[scripts], user))
	}
	return checks
}

func missing(name string, f probe.Finding, user string) check {
	c := check{Check: name, State: stateMissing, Advice: f.Advice}
	for _, right := range f.Missing {
		c.Missing = append(c.Missing, right.String())
	}
	const shown = 2
	c.Detail = strings.Join(c.Missing[:min(shown, len(c.Missing))], ", ")
	if more := len(c.Missing) - shown; more > 0 {
		c.Detail += fmt.Sprintf(" and %d more", more)
	}
	if len(f.Rules) > 0 {
		c.ACL = setUser(user, f.Rules)
	}
	return c
}

func setUser(user string, rules []string) string {
	return "ACL SETUSER " + user + " " + strings.Join(rules, " ")
}

func (p *probeCommand) print(w io.Writer, lists []checklist) error {
	if p.json {
		e := newEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(map[string]any{"nodes": lists})
	}
	var text strings.Builder
	for i, l := range lists {
		if i > 0 {
			text.WriteString("\n")
		}
		fmt.Fprintln(&text, l.Addr)
		for _, c := range l.Checks {
			fmt.Fprintln(&text, strings.TrimRight(fmt.Sprintf("  %-7s  %-16s  %s", c.State, c.Check, printable(c.Detail)), " "))
			switch {
			case c.ACL != "":
				fmt.Fprintln(&text, "          ", c.ACL)
			case c.Advice != "":
				fmt.Fprintln(&text, "          ", c.Advice)
			}
		}
	}
	_, err := io.WriteString(w, text.String())
	return err
}
