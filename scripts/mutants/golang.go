package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strings"
)

// names are the names of tokens in operator names.
var names = map[token.Token]string{
	token.LSS: "lt", token.LEQ: "le", token.GTR: "gt", token.GEQ: "ge", token.EQL: "eq", token.NEQ: "ne",
	token.ADD: "add", token.SUB: "sub", token.MUL: "mul", token.QUO: "div", token.REM: "rem",
	token.LAND: "land", token.LOR: "lor", token.AND: "and", token.OR: "or", token.SHL: "shl", token.SHR: "shr",
	token.ADD_ASSIGN: "add", token.SUB_ASSIGN: "sub", token.INC: "inc", token.DEC: "dec",
	token.BREAK: "break", token.CONTINUE: "continue",
}

// swaps are the replacements of tokens.
var swaps = map[token.Token][]token.Token{
	token.LSS: {token.LEQ, token.GEQ}, token.LEQ: {token.LSS, token.GTR},
	token.GTR: {token.GEQ, token.LEQ}, token.GEQ: {token.GTR, token.LSS},
	token.EQL: {token.NEQ}, token.NEQ: {token.EQL},
	token.ADD: {token.SUB}, token.SUB: {token.ADD}, token.MUL: {token.QUO}, token.QUO: {token.MUL}, token.REM: {token.QUO},
	token.LAND: {token.LOR}, token.LOR: {token.LAND}, token.AND: {token.OR}, token.OR: {token.AND},
	token.SHL: {token.SHR}, token.SHR: {token.SHL},
	token.ADD_ASSIGN: {token.SUB_ASSIGN}, token.SUB_ASSIGN: {token.ADD_ASSIGN},
	token.INC: {token.DEC}, token.DEC: {token.INC},
	token.BREAK: {token.CONTINUE}, token.CONTINUE: {token.BREAK},
}

// goFinder collects the mutants of a Go file.
type goFinder struct {
	file  string
	src   []byte
	at    *token.File
	kept  map[ast.Stmt]bool // statements that cannot be deleted
	found []mutant
}

// goMutants returns the mutants of a Go file. Some of them do not compile.
func goMutants(file string, src []byte) ([]mutant, error) {
	fset := token.NewFileSet()
	tree, err := parser.ParseFile(fset, file, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	f := &goFinder{file: file, src: src, at: fset.File(tree.FileStart), kept: map[ast.Stmt]bool{}}
	for _, decl := range tree.Decls {
		f.walk(decl, nil)
	}
	return f.found, nil
}

func (f *goFinder) add(operator string, from, to token.Pos, text string) {
	f.found = append(f.found, mutant{
		file: f.file, offset: f.at.Offset(from), end: f.at.Offset(to), operator: operator, text: text, line: f.at.Line(from),
	})
}

func (f *goFinder) text(n ast.Node) string {
	return string(f.src[f.at.Offset(n.Pos()):f.at.Offset(n.End())])
}

func (f *goFinder) swap(old token.Token, at token.Pos) {
	for _, other := range swaps[old] {
		f.add(names[old]+"-"+names[other], at, at+token.Pos(len(old.String())), other.String())
	}
}

// walk adds the mutants of a node in a function with these results.
func (f *goFinder) walk(root ast.Node, results []ast.Expr) {
	ast.Inspect(root, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			// The text of an error is not mutated.
			if n.Body != nil && !(n.Recv != nil && n.Name.Name == "Error") {
				f.function(n.Type, n.Body)
			}
			return false
		case *ast.FuncLit:
			f.function(n.Type, n.Body)
			return false
		case *ast.ExprStmt:
			if call, is := n.X.(*ast.CallExpr); is && f.isMessage(call) {
				return false
			}
			f.remove(n)
		case *ast.CallExpr:
			if f.isMessage(n) {
				return false
			}
			f.call(n)
		case *ast.BinaryExpr:
			f.swap(n.Op, n.OpPos)
		case *ast.UnaryExpr:
			if n.Op == token.NOT {
				f.add("drop-not", n.OpPos, n.OpPos+1, "")
			}
		case *ast.BasicLit:
			if n.Kind == token.INT {
				f.add("plus-one", n.Pos(), n.End(), "("+n.Value+" + 1)")
				f.add("minus-one", n.Pos(), n.End(), "("+n.Value+" - 1)")
			}
		case *ast.Ident:
			switch n.Name {
			case "true":
				f.add("false", n.Pos(), n.End(), "false")
			case "false":
				f.add("true", n.Pos(), n.End(), "true")
			}
		case *ast.CompositeLit:
			f.fields(n)
		case *ast.IfStmt:
			f.condition(n.Cond, true)
		case *ast.ForStmt:
			if n.Cond != nil {
				f.condition(n.Cond, false)
			}
		case *ast.RangeStmt:
			f.add("no-round", n.Body.Lbrace+1, n.Body.Lbrace+1, " break; ")
		case *ast.SwitchStmt:
			if n.Tag == nil {
				for _, c := range n.Body.List {
					for _, cond := range c.(*ast.CaseClause).List {
						f.condition(cond, true)
					}
				}
			}
		case *ast.CommClause:
			if n.Comm != nil {
				f.kept[n.Comm] = true
			}
		case *ast.AssignStmt:
			f.swap(n.Tok, n.TokPos)
			if n.Tok != token.DEFINE {
				f.remove(n)
			}
		case *ast.IncDecStmt:
			f.swap(n.Tok, n.TokPos)
			f.remove(n)
		case *ast.BranchStmt:
			if n.Label == nil {
				f.swap(n.Tok, n.TokPos)
			}
			f.remove(n)
		case *ast.DeferStmt, *ast.GoStmt, *ast.SendStmt:
			f.remove(n.(ast.Stmt))
		case *ast.ReturnStmt:
			f.remove(n)
			f.returns(n, results)
		}
		return true
	})
}

func (f *goFinder) remove(s ast.Stmt) {
	if !f.kept[s] {
		f.add("delete", s.Pos(), s.End(), "")
	}
}

// condition replaces a condition by its negation, by false and by true.
func (f *goFinder) condition(cond ast.Expr, always bool) {
	text := f.text(cond)
	negated := false // by another operator
	switch c := cond.(type) {
	case *ast.BinaryExpr:
		negated = c.Op != token.LAND && c.Op != token.LOR
	case *ast.UnaryExpr:
		negated = c.Op == token.NOT
	}
	if !negated {
		f.add("negate", cond.Pos(), cond.End(), "!("+text+")")
	}
	f.add("never", cond.Pos(), cond.End(), "false && ("+text+")")
	if always {
		f.add("always", cond.Pos(), cond.End(), "true || ("+text+")")
	}
}

// call swaps min and max.
func (f *goFinder) call(c *ast.CallExpr) {
	if name, is := c.Fun.(*ast.Ident); is {
		switch name.Name {
		case "min":
			f.add("max", name.Pos(), name.End(), "max")
		case "max":
			f.add("min", name.Pos(), name.End(), "min")
		}
	}
}

var logger = regexp.MustCompile(`(?i)log(ger)?\.(Debug|Info|Warn|Error|Log)\w*$`)

// isMessage reports whether a call creates text for people: for a log, an error or a panic.
func (f *goFinder) isMessage(c *ast.CallExpr) bool {
	name := f.text(c.Fun)
	return name == "panic" || name == "fmt.Errorf" || name == "errors.New" || logger.MatchString(name)
}

// fields removes the fields of a literal, one at a time.
func (f *goFinder) fields(lit *ast.CompositeLit) {
	for i, e := range lit.Elts {
		kv, is := e.(*ast.KeyValueExpr)
		if !is {
			continue
		}
		// Its comma goes with it: the one after it, or the one before.
		from, to := kv.Pos(), kv.End()
		rest := string(f.src[f.at.Offset(to):f.at.Offset(lit.Rbrace)])
		if strings.HasPrefix(strings.TrimLeft(rest, " \t"), ",") {
			to += token.Pos(strings.IndexByte(rest, ',') + 1)
		} else if i > 0 {
			from = lit.Elts[i-1].End()
		}
		f.add("drop-field", from, to, "")
	}
}

// function adds the mutants of a function's body.
func (f *goFinder) function(of *ast.FuncType, body *ast.BlockStmt) {
	var results []ast.Expr
	if of.Results != nil {
		for _, field := range of.Results.List {
			for range max(len(field.Names), 1) {
				results = append(results, field.Type)
			}
		}
	}
	var zeros []string
	for _, r := range results {
		zeros = append(zeros, f.zero(r))
	}
	if len(body.List) > 0 {
		f.add("return-early", body.Lbrace+1, body.Lbrace+1, " return "+strings.Join(zeros, ", ")+"; ")
	}
	f.walk(body, results)
}

// returns replaces the results of a return statement by zero values, one at a time, and
// booleans by their opposite.
func (f *goFinder) returns(s *ast.ReturnStmt, results []ast.Expr) {
	if len(s.Results) != len(results) {
		return
	}
	for i, r := range s.Results {
		text, zero := f.text(r), f.zero(results[i])
		switch {
		case text == "true" || text == "false" || text == zero:
		case f.text(results[i]) == "bool":
			f.add("opposite", r.Pos(), r.End(), "!("+text+")")
		default:
			f.add("zero", r.Pos(), r.End(), zero)
		}
	}
}

// zero returns the zero value of a type.
func (f *goFinder) zero(of ast.Expr) string {
	switch of := of.(type) {
	case *ast.StarExpr, *ast.MapType, *ast.FuncType, *ast.ChanType, *ast.InterfaceType:
		return "nil"
	case *ast.ArrayType:
		if of.Len == nil {
			return "nil"
		}
	case *ast.Ident:
		switch of.Name {
		case "error", "any":
			return "nil"
		case "string":
			return `""`
		case "bool":
			return "false"
		case "int", "int64", "uint64", "int32", "uint32", "uint8", "byte", "float64":
			return "0"
		}
	}
	return "*new(" + f.text(of) + ")"
}
