package main

import (
	"archive/tar"
	"archive/zip"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// command is the module of the command.
const command = module("cmd/redlatch")

// cyclonedx lists what is in a program. It reads that from the program itself.
const cyclonedx = "github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0"

// platforms are those that a release has programs for.
var platforms = []string{
	"linux/amd64", "linux/arm64", "darwin/amd64", "darwin/arm64", "windows/amd64", "windows/arm64",
}

// binaries builds the command from a tag.
type binaries struct {
	root    string // of the repository
	version string
	dir     string // gets the files

	tree    string // a clone of the repository, at the tag
	env     []string
	extra   string    // a folder with manual pages and completions
	created time.Time // the time of the commit, which all files have
}

// build writes an archive and a bill of materials for each platform, and their checksums. The files depend on
// the tag, the release of Go and nothing else: the program gets its version and commit from git, and -trimpath
// keeps the folders of this machine out.
func (b *binaries) build(ctx context.Context, platforms ...string) error {
	work, err := os.MkdirTemp("", "redlatch-binaries-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if err := b.checkOut(ctx, work); err != nil {
		return err
	}
	if err := b.describe(ctx, work); err != nil {
		return err
	}
	if err := os.MkdirAll(b.dir, 0o755); err != nil {
		return err
	}
	var sums strings.Builder
	for _, platform := range platforms {
		files, err := b.buildFor(ctx, work, platform)
		if err != nil {
			return err
		}
		for _, file := range files {
			text, err := os.ReadFile(filepath.Join(b.dir, file))
			if err != nil {
				return err
			}
			fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(text), file)
		}
	}
	return os.WriteFile(filepath.Join(b.dir, "SHA256SUMS"), []byte(sums.String()), 0o644)
}

// checkOut clones the repository at the tag of the command. Modules come from the tags too, and must have the
// checksums that the commit has for them.
func (b *binaries) checkOut(ctx context.Context, work string) error {
	b.tree = filepath.Join(work, "tree")
	if _, err := output(ctx, work, nil, "git", "clone", "-q", "--branch", command.tag(b.version), b.root, b.tree); err != nil {
		return err
	}
	seconds, err := output(ctx, b.tree, nil, "git", "log", "-1", "--format=%ct")
	if err != nil {
		return err
	}
	created, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return err
	}
	b.created = time.Unix(created, 0).UTC()

	env, err := direct(ctx, b.root, filepath.Join(work, "modules"))
	if err != nil {
		return err
	}
	// What else changes a program is as usual, whatever the machine's settings.
	b.env = append(env, "GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "GOFIPS140=off")
	return nil
}

// describe writes the manual pages and the completions, which a program for this machine knows.
func (b *binaries) describe(ctx context.Context, work string) error {
	program := filepath.Join(work, "redlatch"+suffix(runtime.GOOS))
	if err := b.compile(ctx, runtime.GOOS, runtime.GOARCH, program); err != nil {
		return err
	}
	b.extra = filepath.Join(work, "extra")
	if _, err := output(ctx, work, nil, program, "man", filepath.Join(b.extra, "man")); err != nil {
		return err
	}
	completions := filepath.Join(b.extra, "completions")
	if err := os.MkdirAll(completions, 0o755); err != nil {
		return err
	}
	for shell, name := range map[string]string{
		"bash": "redlatch.bash", "zsh": "_redlatch", "fish": "redlatch.fish", "powershell": "redlatch.ps1",
	} {
		text, err := output(ctx, work, nil, program, "completion", shell)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(completions, name), []byte(text+"\n"), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// compile builds the program. The workspace of the repository has versions of other modules, so it is off.
func (b *binaries) compile(ctx context.Context, system, architecture, program string) error {
	env := append(b.env, "GOOS="+system, "GOARCH="+architecture)
	_, err := output(ctx, filepath.Join(b.tree, string(command)), env, "go", "build", "-buildvcs=true", "-ldflags=-s -w", "-o", program, ".")
	return err
}

// buildFor returns the names of the files for a platform.
func (b *binaries) buildFor(ctx context.Context, work, platform string) (files []string, err error) {
	system, architecture, _ := strings.Cut(platform, "/")
	name := fmt.Sprintf("redlatch_%s_%s_%s", strings.TrimPrefix(b.version, "v"), system, architecture)
	stage := filepath.Join(work, name)
	program := filepath.Join(stage, "redlatch"+suffix(system))
	if err := b.compile(ctx, system, architecture, program); err != nil {
		return nil, err
	}

	bill := name + ".cdx.json"
	// The bill has neither a time nor a random number, but the checksum of the tool.
	_, err = output(ctx, work, b.env, "go", "run", cyclonedx, "bin",
		"-json", "-std", "-noserial", "-notimestamp", "-output", filepath.Join(b.dir, bill), program)
	if err != nil {
		return nil, err
	}

	for _, file := range []string{"LICENSE", "CHANGELOG.md"} {
		text, err := os.ReadFile(filepath.Join(b.tree, file))
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(stage, file), text, 0o644); err != nil {
			return nil, err
		}
	}
	if err := os.CopyFS(stage, os.DirFS(b.extra)); err != nil {
		return nil, err
	}
	pack, end := packTar, ".tar.gz"
	if system == "windows" {
		pack, end = packZip, ".zip"
	}
	archive, err := os.Create(filepath.Join(b.dir, name+end))
	if err != nil {
		return nil, err
	}
	err = pack(archive, stage, b.created)
	return []string{name + end, bill}, cmp.Or(archive.Close(), err)
}

// suffix ends the name of a program.
func suffix(system string) string {
	if system == "windows" {
		return ".exe"
	}
	return ""
}

// packTar writes an archive of a folder. Its files have the time created, and no owner.
func packTar(w io.Writer, folder string, created time.Time) error {
	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	err := eachFile(folder, func(name string, mode fs.FileMode, text []byte) error {
		header := &tar.Header{Name: name, Mode: int64(mode), Size: int64(len(text)), ModTime: created}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		_, err := archive.Write(text)
		return err
	})
	return cmp.Or(err, archive.Close(), compressed.Close())
}

// packZip is packTar for Windows.
func packZip(w io.Writer, folder string, created time.Time) error {
	archive := zip.NewWriter(w)
	err := eachFile(folder, func(name string, mode fs.FileMode, text []byte) error {
		header := &zip.FileHeader{Name: name, Method: zip.Deflate, Modified: created}
		header.SetMode(mode)
		file, err := archive.CreateHeader(header)
		if err != nil {
			return err
		}
		_, err = file.Write(text)
		return err
	})
	return cmp.Or(err, archive.Close())
}

// eachFile calls add with the files of a folder in the order of their names, which begin with the name of the
// folder. Their modes do not depend on the umask.
func eachFile(folder string, add func(name string, mode fs.FileMode, text []byte) error) error {
	return filepath.WalkDir(folder, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(filepath.Dir(folder), file)
		if err != nil {
			return err
		}
		mode := fs.FileMode(0o644)
		if filepath.Dir(file) == folder && strings.HasPrefix(entry.Name(), "redlatch") { // the program
			mode = 0o755
		}
		return add(filepath.ToSlash(name), mode, text)
	})
}
