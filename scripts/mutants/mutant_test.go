package main

import (
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const root = "../.."

// described returns the mutants of a source as "line operator: before => after".
func described(t *testing.T, file, src string) (lines []string) {
	t.Helper()
	found, err := mutantsOf(file)(file, []byte(src))
	require.NoError(t, err)
	for _, m := range found {
		lines = append(lines, fmt.Sprintf("%d %s: %s", m.line, m.operator, m.diff([]byte(src))))
	}
	return lines
}

func TestMutantsOfGo(t *testing.T) {
	t.Parallel()
	const src = `package p

import "errors"

func f(a, b int, log *logger) (int, error) {
	if a < b && ok() {
		log.Warn("text", "n", 7)
		return 0, errors.New("no")
	}
	for i := range a {
		b += i
	}
	defer done()
	s := S{A: a, B: true}
	switch {
	case b >= 3:
		b--
	}
	select {
	case <-s.C:
	}
	return min(a, b), nil
}

func g() bool { return !ok() }

func (e E) Error() string { return text(1) }
`
	assert.ElementsMatch(t, []string{
		"5 return-early: func f(a, b int, log *logger) (int, error) {  =>  func f(a, b int, log *logger) (int, error) { return 0, nil;",
		"6 land-lor: if a < b && ok() {  =>  if a < b || ok() {",
		"6 lt-le: if a < b && ok() {  =>  if a <= b && ok() {",
		"6 lt-ge: if a < b && ok() {  =>  if a >= b && ok() {",
		"6 negate: if a < b && ok() {  =>  if !(a < b && ok()) {",
		"6 never: if a < b && ok() {  =>  if false && (a < b && ok()) {",
		"6 always: if a < b && ok() {  =>  if true || (a < b && ok()) {",
		`8 delete: return 0, errors.New("no")  =>  (nothing)`,
		`8 plus-one: return 0, errors.New("no")  =>  return (0 + 1), errors.New("no")`,
		`8 minus-one: return 0, errors.New("no")  =>  return (0 - 1), errors.New("no")`,
		`8 zero: return 0, errors.New("no")  =>  return 0, nil`,
		"10 no-round: for i := range a {  =>  for i := range a { break;",
		"11 add-sub: b += i  =>  b -= i",
		"11 delete: b += i  =>  (nothing)",
		"13 delete: defer done()  =>  (nothing)",
		"14 drop-field: s := S{A: a, B: true}  =>  s := S{ B: true}",
		"14 drop-field: s := S{A: a, B: true}  =>  s := S{A: a}",
		"14 false: s := S{A: a, B: true}  =>  s := S{A: a, B: false}",
		"16 ge-gt: case b >= 3:  =>  case b > 3:",
		"16 ge-lt: case b >= 3:  =>  case b < 3:",
		"16 never: case b >= 3:  =>  case false && (b >= 3):",
		"16 always: case b >= 3:  =>  case true || (b >= 3):",
		"16 plus-one: case b >= 3:  =>  case b >= (3 + 1):",
		"16 minus-one: case b >= 3:  =>  case b >= (3 - 1):",
		"17 dec-inc: b--  =>  b++",
		"17 delete: b--  =>  (nothing)",
		"22 delete: return min(a, b), nil  =>  (nothing)",
		"22 max: return min(a, b), nil  =>  return max(a, b), nil",
		"22 zero: return min(a, b), nil  =>  return 0, nil",
		"25 return-early: func g() bool { return !ok() }  =>  func g() bool { return false;  return !ok() }",
		"25 delete: func g() bool { return !ok() }  =>  func g() bool {  }",
		"25 drop-not: func g() bool { return !ok() }  =>  func g() bool { return ok() }",
		"25 opposite: func g() bool { return !ok() }  =>  func g() bool { return !(!ok()) }",
	}, described(t, "p/p.go", src))
}

func TestMutantsOfLua(t *testing.T) {
	t.Parallel()
	const src = `-- 1 + 1 in a comment
local key = KEYS[1]
if redis.call('EXISTS', key) == 0 and not held then
	redis.call('HSET', key,
		'mode', ARGV[2])
	redis.call('DEL', key)
	return redis.error_reply('ERR 5 ' .. key)
end
for i = 1, n do total = total + i end
return total
`
	assert.ElementsMatch(t, []string{
		"2 delete: local key = KEYS[1]  =>  (nothing)",
		"2 plus-one: local key = KEYS[1]  =>  local key = KEYS[2]",
		"2 minus-one: local key = KEYS[1]  =>  local key = KEYS[0]",
		"3 negate: if redis.call('EXISTS', key) == 0 and not held then  =>  if not (redis.call('EXISTS', key) == 0 and not held) then",
		"3 never: if redis.call('EXISTS', key) == 0 and not held then  =>  if false and (redis.call('EXISTS', key) == 0 and not held) then",
		"3 always: if redis.call('EXISTS', key) == 0 and not held then  =>  if true or (redis.call('EXISTS', key) == 0 and not held) then",
		"3 pcall: if redis.call('EXISTS', key) == 0 and not held then  =>  if redis.pcall('EXISTS', key) == 0 and not held then",
		"3 eq-ne: if redis.call('EXISTS', key) == 0 and not held then  =>  if redis.call('EXISTS', key) ~= 0 and not held then",
		"3 plus-one: if redis.call('EXISTS', key) == 0 and not held then  =>  if redis.call('EXISTS', key) == 1 and not held then",
		"3 minus-one: if redis.call('EXISTS', key) == 0 and not held then  =>  if redis.call('EXISTS', key) == -1 and not held then",
		"3 and-or: if redis.call('EXISTS', key) == 0 and not held then  =>  if redis.call('EXISTS', key) == 0 or not held then",
		"3 drop-not: if redis.call('EXISTS', key) == 0 and not held then  =>  if redis.call('EXISTS', key) == 0 and  held then",
		"4 pcall: redis.call('HSET', key,  =>  redis.pcall('HSET', key,",
		"5 string: 'mode', ARGV[2])  =>  'mode_', ARGV[2])",
		"5 plus-one: 'mode', ARGV[2])  =>  'mode', ARGV[3])",
		"5 minus-one: 'mode', ARGV[2])  =>  'mode', ARGV[1])",
		"6 delete: redis.call('DEL', key)  =>  (nothing)",
		"6 pcall: redis.call('DEL', key)  =>  redis.pcall('DEL', key)",
		"6 look: redis.call('DEL', key)  =>  redis.call('EXISTS', key)",
		"7 delete: return redis.error_reply('ERR 5 ' .. key)  =>  (nothing)",
		"7 nil: return redis.error_reply('ERR 5 ' .. key)  =>  return nil",
		"9 delete: for i = 1, n do total = total + i end  =>  (nothing)",
		"9 plus-one: for i = 1, n do total = total + i end  =>  for i = 2, n do total = total + i end",
		"9 minus-one: for i = 1, n do total = total + i end  =>  for i = 0, n do total = total + i end",
		"9 add-sub: for i = 1, n do total = total + i end  =>  for i = 1, n do total = total - i end",
		"10 delete: return total  =>  (nothing)",
		"10 nil: return total  =>  return nil",
	}, described(t, "p/p.lua", src))
}

func TestTestsAreNotMutated(t *testing.T) {
	t.Parallel()
	all, err := find(root)
	require.NoError(t, err)
	ids, dirs, lua := map[string]bool{}, map[string]bool{}, 0
	for _, m := range all {
		if ids[m.id()] || strings.Contains(m.file, "_test.go") || strings.Contains(m.file, "testdata") {
			t.Errorf("not production code, or a duplicate id: %s", m.id())
		}
		ids[m.id()], dirs[m.dir()] = true, true
		if strings.HasSuffix(m.file, ".lua") {
			lua++
		}
	}
	for _, dir := range production {
		assert.True(t, dirs[dir], "no mutants in %s", dir)
	}
	assert.Positive(t, lua)
}

// Every package with production code is mutated, including packages added later.
func TestProductionIsComplete(t *testing.T) {
	t.Parallel()
	others := []string{"cmd", "contrib", "examples", "benchmarks", "interop", "robustness", "scripts", "redlatchtest",
		"internal/harness", "internal/testserver", "internal/contract", "internal/lockstep", "internal/memstore", "lock/locktest"}
	require.NoError(t, filepath.WalkDir(root, func(file string, d os.DirEntry, err error) error {
		require.NoError(t, err)
		if d.IsDir() {
			if name := d.Name(); name == "testdata" || file != root && strings.HasPrefix(name, ".") {
				return filepath.SkipDir
			}
			return nil
		}
		if mutantsOf(file) == nil {
			return nil
		}
		dir, err := filepath.Rel(root, filepath.Dir(file))
		require.NoError(t, err)
		for _, other := range others {
			if dir == other || strings.HasPrefix(dir, other+"/") {
				return nil
			}
		}
		assert.Contains(t, production, strings.TrimSuffix(filepath.ToSlash(dir), "/lua"), "%s is not mutated", file)
		return nil
	}))
}

// Mutants are at least well-formed; otherwise few of them would compile.
func TestMutantsOfGoParse(t *testing.T) {
	t.Parallel()
	all, err := find(root)
	require.NoError(t, err)
	for _, m := range order(all, 1)[:100] {
		src, err := os.ReadFile(filepath.Join(root, m.file))
		require.NoError(t, err)
		text := m.apply(src)
		assert.NotEqual(t, string(src), string(text), m.id())
		if strings.HasSuffix(m.file, ".go") {
			_, err = parser.ParseFile(token.NewFileSet(), m.file, text, parser.SkipObjectResolution)
			assert.NoError(t, err, "%s: %s", m.id(), m.diff(src))
		}
	}
}

// A line with many mutants is drawn as often as one with a single mutant.
func TestLinesAreEquallyLikely(t *testing.T) {
	t.Parallel()
	all := []mutant{{file: "f", line: 1, operator: "a"}}
	for i := range 9 {
		all = append(all, mutant{file: "f", line: 2, operator: fmt.Sprint(i)})
	}
	const draws = 1000
	first := 0
	for seed := range uint64(draws) {
		drawn := order(all, seed)
		assert.ElementsMatch(t, all, drawn)
		assert.Equal(t, drawn, order(all, seed), "a seed determines the order")
		first += drawn[0].line - 1
	}
	assert.InDelta(t, draws/2, first, draws/10)
}

func TestCandidates(t *testing.T) {
	t.Parallel()
	uses := func(pkg, dir string) bool { return pkg != "internal/hub" || dir == "internal/wire" }
	for _, c := range []struct {
		dir  string
		lua  bool
		want []string
	}{
		{"rlock", false, []string{"rlock", "internal/contract", "internal/system"}},
		{"rlock", true, []string{"rlock", "internal/contract"}},
		{".", true, []string{".", "internal/contract", "internal/system"}},
		{"internal/engine", false, []string{"internal/engine", "internal/contract", "internal/system", "rlock", "fairlock", "grouplock", "rwlock", "semaphore", "countdown", "multilock"}},
		{"internal/session", false, []string{"internal/contract", "internal/system", "rlock", "fairlock", "grouplock", "rwlock", "semaphore", "countdown", "multilock"}},
	} {
		hasTests := func(pkg string) bool { return pkg != "internal/session" }
		assert.Equal(t, c.want, candidates(c.dir, c.lua, uses, hasTests), c.dir)
	}
}
