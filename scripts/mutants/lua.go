package main

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// luaToken is a Lua token outside of comments.
type luaToken struct {
	text      string
	from, to  int
	line      int
	openAt    int  // the number of open brackets before it
	errorText bool // it is part of an error message
}

var luaTokens = regexp.MustCompile(`(?s)` + strings.Join([]string{
	`--\[\[.*?\]\]`, `--[^\n]*`, `\n`, `[ \t\r]+`, // not a token
	`'(?:[^'\\\n]|\\.)*'`, `"(?:[^"\\\n]|\\.)*"`,
	`0[xX][0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?`, `[A-Za-z_]\w*`,
	`\.\.\.|\.\.|==|~=|<=|>=|.`,
}, "|"))

// tokenize returns the tokens of a script.
func tokenize(src []byte) (tokens []luaToken) {
	line, open := 1, 0
	for _, at := range luaTokens.FindAllIndex(src, -1) {
		text := string(src[at[0]:at[1]])
		if strings.HasPrefix(text, "--") || strings.TrimSpace(text) == "" {
			line += strings.Count(text, "\n")
			continue
		}
		if strings.Contains(")]}", text) {
			open--
		}
		tokens = append(tokens, luaToken{text: text, from: at[0], to: at[1], line: line, openAt: open})
		if strings.Contains("([{", text) {
			open++
		}
	}
	for i, t := range tokens {
		// error(...), redis.error_reply(...), {err = ...}
		field := t.text == "err" && i+1 < len(tokens) && tokens[i+1].text == "="
		if !field && t.text != "error" && t.text != "error_reply" {
			continue
		}
		for k := i + 1; k < len(tokens) && (k == i+1 || tokens[k].openAt > t.openAt || field && tokens[k].openAt == t.openAt && tokens[k].text != ","); k++ {
			tokens[k].errorText = true
		}
	}
	return tokens
}

// luaSwaps are the replacements of tokens, by operator name.
var luaSwaps = map[string]map[string]string{
	"==": {"eq-ne": "~="}, "~=": {"ne-eq": "=="},
	"<": {"lt-le": "<=", "lt-ge": ">="}, "<=": {"le-lt": "<", "le-gt": ">"},
	">": {"gt-ge": ">=", "gt-le": "<="}, ">=": {"ge-gt": ">", "ge-lt": "<"},
	"+": {"add-sub": "-"}, "-": {"sub-add": "+"}, "*": {"mul-div": "/"}, "/": {"div-mul": "*"},
	"and": {"and-or": "or"}, "or": {"or-and": "and"}, "not": {"drop-not": ""},
	"true": {"false": "false"}, "false": {"true": "true"},
	"min": {"max": "max"}, "max": {"min": "min"}, "floor": {"ceil": "ceil"}, "ceil": {"floor": "floor"},
	"call": {"pcall": "pcall"}, "pcall": {"call": "call"},

	// Commands and their options. A writing command becomes a reading one.
	"'DEL'": {"look": "'EXISTS'"}, "'HDEL'": {"look": "'HEXISTS'"}, "'ZREM'": {"look": "'ZSCORE'"},
	"'LPUSH'": {"other-end": "'RPUSH'"}, "'RPUSH'": {"other-end": "'LPUSH'"},
	"'LPOP'": {"other-end": "'RPOP'"}, "'RPOP'": {"other-end": "'LPOP'"},
	"'ZRANGE'": {"backwards": "'ZREVRANGE'"},
	"'NX'":     {"opposite": "'XX'"}, "'XX'": {"opposite": "'NX'"}, "'GT'": {"opposite": "'LT'"}, "'LT'": {"opposite": "'GT'"},
}

var luaInteger = regexp.MustCompile(`^(['"]?)(\d+)(['"]?)$`)

// luaFinder collects the mutants of a script.
type luaFinder struct {
	file   string
	src    []byte
	tokens []luaToken
	found  []mutant
}

// luaMutants returns the mutants of a script. Some of them are not valid.
func luaMutants(file string, src []byte) ([]mutant, error) {
	f := &luaFinder{file: file, src: src, tokens: tokenize(src)}
	for i, t := range f.tokens {
		if t.errorText {
			continue
		}
		f.token(i, t)
		switch t.text {
		case "if", "elseif":
			f.condition(i, "then", true)
		case "while":
			f.condition(i, "do", false)
		case "return":
			f.returns(i)
		}
	}
	f.lines()
	return f.found, nil
}

func (f *luaFinder) add(operator string, from, to, line int, text string) {
	f.found = append(f.found, mutant{
		file: f.file, offset: from, end: to, operator: operator, text: text, line: line,
	})
}

// token adds the mutants of one token.
func (f *luaFinder) token(i int, t luaToken) {
	for operator, other := range luaSwaps[t.text] {
		f.add(operator, t.from, t.to, t.line, other)
	}
	if n := luaInteger.FindStringSubmatch(t.text); n != nil {
		if value, err := strconv.Atoi(n[2]); err == nil {
			f.add("plus-one", t.from, t.to, t.line, fmt.Sprint(n[1], value+1, n[3]))
			f.add("minus-one", t.from, t.to, t.line, fmt.Sprint(n[1], value-1, n[3]))
		}
		return
	}
	// A string other than the name of a command.
	isCommand := i >= 2 && f.tokens[i-1].text == "(" && strings.HasSuffix(f.tokens[i-2].text, "call")
	if strings.ContainsAny(t.text[:1], `'"`) && len(t.text) > 2 && !isCommand && luaSwaps[t.text] == nil {
		f.add("string", t.from, t.to, t.line, t.text[:len(t.text)-1]+"_"+t.text[len(t.text)-1:])
	}
}

// condition replaces the tokens between token i and the next one that is until.
func (f *luaFinder) condition(i int, until string, always bool) {
	end := slices.IndexFunc(f.tokens[i:], func(t luaToken) bool { return t.text == until })
	if end < 2 {
		return
	}
	first, last := f.tokens[i+1], f.tokens[i+end-1]
	text := string(f.src[first.from:last.to])
	f.add("negate", first.from, last.to, first.line, "not ("+text+")")
	f.add("never", first.from, last.to, first.line, "false and ("+text+")")
	if always {
		f.add("always", first.from, last.to, first.line, "true or ("+text+")")
	}
}

// returns replaces the value returned by token i by nil, if it is on the same line.
func (f *luaFinder) returns(i int) {
	t, end := f.tokens[i], i+1
	for end < len(f.tokens) && f.tokens[end].line == t.line && f.tokens[end].text != "end" {
		end++
	}
	complete := end == len(f.tokens) || f.tokens[end].openAt == t.openAt
	if end > i+1 && complete && f.tokens[i+1].text != "nil" && f.tokens[i+1].text != "function" {
		f.add("nil", f.tokens[i+1].from, f.tokens[end-1].to, t.line, "nil")
	}
}

// continues matches the first token of a line that continues the one before, and the last
// token of an incomplete line.
var (
	continues = regexp.MustCompile(`^(?:and|or|\.\.|==|~=|<=|>=|[-+*/<>=,.:)\]}])$`)
	goesOn    = regexp.MustCompile(`^(?:and|or|not|\.\.|==|~=|<=|>=|[-+*/<>=,.:(\[{])$`)
)

// lines removes lines that are statements, one at a time.
func (f *luaFinder) lines() {
	for begin := 0; begin < len(f.tokens); {
		line, end := f.tokens[begin].line, begin
		for end < len(f.tokens) && f.tokens[end].line == line {
			end++
		}
		if f.complete(begin, end) {
			f.add("delete", f.tokens[begin].from, f.tokens[end-1].to, line, "")
		}
		begin = end
	}
}

// complete reports whether the tokens of a line are complete statements.
func (f *luaFinder) complete(begin, end int) bool {
	of := f.tokens[begin:end]
	if of[0].openAt > 0 || end < len(f.tokens) && (f.tokens[end].openAt > 0 || continues.MatchString(f.tokens[end].text)) {
		return false
	}
	if continues.MatchString(of[0].text) || goesOn.MatchString(of[len(of)-1].text) {
		return false
	}
	blocks := 0
	for _, t := range of {
		switch t.text {
		case "if", "for", "while", "function", "repeat":
			blocks++
		case "end", "until":
			blocks--
		case "else", "elseif", "do", "then":
			if blocks == 0 {
				return false
			}
		}
		if blocks < 0 {
			return false
		}
	}
	return blocks == 0 && !bytes.HasPrefix(f.src[of[0].from:], []byte("local function"))
}
