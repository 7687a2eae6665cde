package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

func newMan() *cobra.Command {
	return &cobra.Command{
		Use:   "man DIR",
		Short: "Write the manual pages",
		Long: `Write a manual page for each command to the folder DIR, which is created if it does not exist. The
command prints nothing.

Exit status:
  0        written
  125      redlatch failed, for example because it may not write to DIR`,
		Example: `  redlatch man /usr/local/share/man/man1`,
		Args:    arguments(1, 1),
		Hidden:  true, // it is for packagers
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return err
			}
			return writeManual(cmd.Root(), args[0])
		},
	}
}

// writeManual writes the page of a command, and those of its subcommands.
func writeManual(cmd *cobra.Command, dir string) error {
	if err := os.WriteFile(filepath.Join(dir, pageName(cmd)+".1"), []byte(manualPage(cmd)), 0o644); err != nil {
		return err
	}
	for _, sub := range documented(cmd) {
		if err := writeManual(sub, dir); err != nil {
			return err
		}
	}
	return nil
}

// documented returns the subcommands that have a page. Those of cobra explain themselves.
func documented(cmd *cobra.Command) []*cobra.Command {
	return slices.DeleteFunc(slices.Clone(cmd.Commands()), func(sub *cobra.Command) bool {
		return !sub.IsAvailableCommand() || sub.Name() == "completion" || sub.Name() == "help"
	})
}

func pageName(cmd *cobra.Command) string { return strings.ReplaceAll(cmd.CommandPath(), " ", "-") }

// manualPage returns the page in the language of man(7). The texts of the help are laid out for a
// terminal, so that they stay as they are.
func manualPage(cmd *cobra.Command) string {
	var page strings.Builder
	section := func(title, text string) {
		if text = strings.Trim(text, "\n"); text != "" {
			fmt.Fprintf(&page, ".SH %s\n.nf\n%s\n.fi\n", title, roff(text))
		}
	}
	fmt.Fprintf(&page, ".TH \"%s\" \"1\" \"\" \"redlatch\" \"redlatch manual\"\n", roff(strings.ToUpper(pageName(cmd))))
	fmt.Fprintf(&page, ".SH NAME\n%s \\- %s\n", roff(pageName(cmd)), roff(cmd.Short))
	section("SYNOPSIS", cmd.UseLine())
	section("DESCRIPTION", cmd.Long)
	var commands, pages strings.Builder
	if cmd.HasParent() {
		fmt.Fprintf(&pages, "%s(1)\n", pageName(cmd.Parent()))
	}
	for _, sub := range documented(cmd) {
		fmt.Fprintf(&commands, "%-*s  %s\n", sub.NamePadding(), sub.Name(), sub.Short)
		fmt.Fprintf(&pages, "%s(1)\n", pageName(sub))
	}
	section("COMMANDS", commands.String())
	section("OPTIONS", cmd.NonInheritedFlags().FlagUsages())
	section("GLOBAL OPTIONS", cmd.InheritedFlags().FlagUsages())
	section("EXAMPLES", cmd.Example)
	section("SEE ALSO", pages.String())
	return page.String()
}

// roffEscapes keeps characters that roff replaces by typographic ones, so that examples can be copied.
var roffEscapes = strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "^", `\(ha`, "~", `\(ti`)

// roff escapes a text.
func roff(text string) string {
	lines := strings.Split(roffEscapes.Replace(text), "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, ".") {
			lines[i] = `\&` + line // not a request
		}
	}
	return strings.Join(lines, "\n")
}
