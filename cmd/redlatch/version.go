package main

import (
	"cmp"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func newVersion() *cobra.Command {
	asJSON := false
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of redlatch",
		Long: `Print the version of redlatch, the commit that it was built from, and the Go release and the platform
that it was built with.

The version is (devel) if redlatch was not built from a release, and the commit is missing if git did
not tell it to the Go command, as for go install.

` + statusHelpOf("printed", ""),
		Example: `  redlatch version
  redlatch version --json`,
		Args:              arguments(0, 0),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(*cobra.Command, []string) error {
			b := readBuild()
			if asJSON {
				return newEncoder(os.Stdout).Encode(b)
			}
			return printLine("redlatch", b.Version, cmp.Or(b.Commit, "-"), b.Go, b.Platform)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// build says what this program was built from.
type build struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// readBuild returns what the Go command has recorded in the program.
func readBuild() build {
	b := build{Version: "(devel)", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	b.Version = cmp.Or(info.Main.Version, b.Version)
	for _, setting := range info.Settings {
		if setting.Key == "vcs.revision" {
			b.Commit = setting.Value
		}
	}
	return b
}
