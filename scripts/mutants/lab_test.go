package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFirstFailure(t *testing.T) {
	t.Parallel()
	const ran = `{"Action":"run","Test":"TestA"}` + "\n" + `{"Action":"pass","Test":"TestA"}` + "\n"
	for out, want := range map[string]struct {
		by    string
		ended bool
	}{
		ran + `{"Action":"pass"}`: {"", true},
		ran:                       {"", false},
		`{"Action":"skip"}`:       {"", true},
		ran + `{"Action":"fail","Test":"TestB/b"}` + "\n" + `{"Action":"fail","Test":"TestB"}`: {"TestB/b", true},
		ran + `{"Action":"fail"}`: {"the package", true},
		ran + `{"Action":"output","Output":"panic: test timed out after 1s\n"}`:                             {"timeout", true},
		ran + `{"Action":"output","Test":"TestB","Output":"panic: nil map [recovered]\n"}`:                  {"TestB: panic: nil map [recovered]", true},
		ran + `{"Action":"output","Output":"fatal error: all goroutines are asleep\n"}`:                     {"fatal error: all goroutines are asleep", true},
		"not JSON\n" + `{"Action":"build-fail"}`:                                                            {"build failed", true},
		ran + `{"Action":"output","Test":"TestB","Output":"no panic: here\n"}` + "\n" + `{"Action":"pass"}`: {"", true},
	} {
		by, ended := firstFailure(strings.NewReader(out))
		assert.Equal(t, want.by, by, out)
		assert.Equal(t, want.ended, ended, out)
	}
}

// repository creates a repository with these files for the duration of a test.
func repository(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	git := exec.Command("git", "init", "-q")
	git.Dir = dir
	require.NoError(t, git.Run())
	return dir
}

var small = map[string]string{
	".gitignore": "ignored\n",
	"ignored":    "",
	"go.mod":     "module github.com/redlatch/redlatch\n\ngo 1.25\n",
	"lock/lock.go": `package lock

func Add(a, b int) int {
	if a > 1000 {
		a = b
	}
	c := a + b
	return c
}

func Down(n int) int {
	for n > 0 {
		n--
	}
	return n
}
`,
	"lock/lock_test.go": `package lock

import "testing"

func TestAdd(t *testing.T) {
	if Add(2, 3) != 5 {
		t.Error("no")
	}
	if Down(3) != 0 {
		t.Error("no")
	}
}
`,
}

func TestTreeIsACopy(t *testing.T) {
	t.Parallel()
	from := repository(t, small)
	tr, err := newTree(from, t.TempDir())
	require.NoError(t, err)
	assert.NoFileExists(t, filepath.Join(tr.root, "ignored"))
	text := func(root string) string {
		b, err := os.ReadFile(filepath.Join(root, "lock/lock.go"))
		require.NoError(t, err)
		return string(b)
	}
	require.NoError(t, tr.with("lock/lock.go", []byte("other"), func() error {
		assert.Equal(t, "other", text(tr.root))
		assert.Equal(t, small["lock/lock.go"], text(from))
		return nil
	}))
	assert.Equal(t, small["lock/lock.go"], text(tr.root))
	assert.True(t, tr.hasTests("lock"))
	assert.False(t, tr.hasTests("."))
}

// tried runs the command in a repository and returns its output and its ledger.
func tried(t *testing.T, dir string, args ...string) (string, string) {
	t.Helper()
	t.Chdir(dir)
	var out strings.Builder
	file := filepath.Join(dir, "ignored")
	require.NoError(t, run(t.Context(), append([]string{"-o", file, "-j", "2"}, args...), &out))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return out.String(), string(text)
}

func TestMutantsAreTried(t *testing.T) {
	dir := repository(t, small)
	at := func(what string) string { // the offset of a text
		before, _, found := strings.Cut(small["lock/lock.go"], what)
		require.True(t, found)
		return "lock/lock.go:" + strconv.Itoa(len(before))
	}
	ids := strings.Join([]string{
		at("+ b") + ":add-sub", at("> 1000") + ":gt-ge", at("return c") + ":delete", at("n--") + ":delete",
	}, ",")
	out, ledger := tried(t, dir, "-run", ids, "-timeout", "2s")
	assert.Contains(t, out, "c := a + b  =>  c := a - b\n     killed by lock/TestAdd after ")
	assert.Contains(t, out, "if a > 1000 {  =>  if a >= 1000 {\n     SURVIVED after ")
	assert.Contains(t, out, "return c  =>  (nothing)\n     does not compile")
	assert.Contains(t, out, "n--  =>  (nothing)\n     killed by lock/timeout after ")
	assert.Contains(t, out, "lock                        2         1\nall                         2         1\n")
	assert.Equal(t, 4, strings.Count(ledger, "\n"))

	// Drawing continues with the ledger: recorded mutants are not tried again, and mutants
	// that do not compile do not count.
	out, ledger = tried(t, dir, "-n", "4", "-seed", "5", "-timeout", "2s")
	assert.Equal(t, 4, strings.Count(out, " => ")-strings.Count(out, "\nline "))
	again, same := tried(t, dir, "-n", "4")
	assert.Contains(t, again, "seed 5: ")
	assert.Equal(t, 4, strings.Count(again, "(before)"))
	assert.Equal(t, ledger, same)

	require.NoError(t, os.WriteFile(filepath.Join(dir, "lock/lock_test.go"), []byte(strings.Replace(small["lock/lock_test.go"], "5", "6", 1)), 0o644))
	t.Chdir(dir)
	require.ErrorContains(t, run(t.Context(), []string{"-n", "1"}, &strings.Builder{}), "without a mutant, lock/TestAdd fails")
}

func TestLuaMustCompileToo(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("luacheck"); err != nil {
		t.Skip("no luacheck: make lint installs it")
	}
	const src = "local key = KEYS[1]\nredis.call('DEL', key)\nreturn 1\n"
	tr, err := newTree(repository(t, map[string]string{
		"lock/a.lua": src, ".luacheckrc": `read_globals = {"redis", "KEYS"}`,
	}), t.TempDir())
	require.NoError(t, err)
	found, err := luaMutants("lock/a.lua", []byte(src))
	require.NoError(t, err)
	for _, m := range found {
		var ok bool
		require.NoError(t, tr.with(m.file, m.apply([]byte(src)), func() (err error) {
			ok, err = tr.compiles(t.Context(), m)
			return err
		}))
		assert.Equal(t, m.line != 1 || m.operator != "delete", ok, m.diff([]byte(src)))
	}
}
