package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// prefix is the prefix of the names of all metrics of ours.
const prefix = "tripod_"

// metric is a metric of the daemon or the orchestrator, as its source declares it.
type metric struct {
	name, help string
	labels     []string
}

// daemonMetrics finds the metrics that the source declares, sorted by name. It knows these forms, and the same with a
// constant prefix in a helper function, whose calls then name the metric and further labels:
//
//	prometheus.NewDesc("tripod_name", "help", []string{"label"}, nil)
//	prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tripod_name", Help: "help"}, []string{"label"})
//	func gauge(name, help string, …) { … prometheus.NewDesc("tripod_part_"+name, help, …) … }
func daemonMetrics(root string) ([]metric, error) {
	var all []metric
	for _, top := range []string{"internal", "cmd"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return err
			}
			files, err := parseDir(path)
			if err == nil {
				all = append(all, packageMetrics(files)...)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	slices.SortStableFunc(all, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	return slices.CompactFunc(all, func(a, b metric) bool { return a.name == b.name }), nil
}

func parseDir(dir string) (files []*ast.File, err error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

// packageMetrics returns the metrics that the files of a package declare.
func packageMetrics(files []*ast.File) (all []metric) {
	helpers := map[string]metric{} // by function, with the prefix as name
	for _, f := range files {
		declarations(f, func(function string, d declaration) {
			if sum, ok := d.name.(*ast.BinaryExpr); ok {
				if text, ok := constant(sum.X); ok && strings.HasPrefix(text, prefix) {
					helpers[function] = metric{name: text, labels: literals(d.rest)}
				}
			}
			if text, ok := constant(d.name); ok && strings.HasPrefix(text, prefix) {
				meaning, _ := constant(d.help)
				all = append(all, metric{text, meaning, literals(d.rest)})
			}
		})
	}
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) < 2 {
				return true
			}
			function, _ := call.Fun.(*ast.Ident)
			if function == nil {
				return true
			}
			helper, ok := helpers[function.Name]
			if name, literal := constant(call.Args[0]); ok && literal {
				meaning, _ := constant(call.Args[1])
				all = append(all, metric{helper.name + name, meaning, slices.Concat(helper.labels, literals(call.Args[2:]))})
			}
			return true
		})
	}
	return all
}

// declaration holds the expressions that name and describe a metric, and those that contain its labels.
type declaration struct {
	name, help ast.Expr
	rest       []ast.Expr
}

// declarations calls f for each declaration in a file, with the name of the function around it.
func declarations(file *ast.File, f func(function string, d declaration)) {
	var visit func(function string, n ast.Node)
	visit = func(function string, n ast.Node) {
		ast.Inspect(n, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Body != nil {
					visit(n.Name.Name, n.Body)
				}
				return false
			case *ast.AssignStmt:
				if literal, ok := n.Rhs[0].(*ast.FuncLit); ok {
					if name, ok := n.Lhs[0].(*ast.Ident); ok {
						visit(name.Name, literal.Body)
						return false
					}
				}
			case *ast.CallExpr:
				if d, ok := declared(n); ok {
					f(function, d)
				}
			}
			return true
		})
	}
	visit("", file)
}

// declared returns the metric that a call of the Prometheus library declares.
func declared(call *ast.CallExpr) (d declaration, ok bool) {
	s, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || len(call.Args) == 0 {
		return d, false
	}
	if s.Sel.Name == "NewDesc" && len(call.Args) > 2 {
		return declaration{call.Args[0], call.Args[1], call.Args[2:]}, true
	}
	options, ok := call.Args[0].(*ast.CompositeLit)
	if !ok {
		return d, false
	}
	d = declaration{field(options, "Name"), field(options, "Help"), call.Args[1:]}
	if constants := field(options, "ConstLabels"); constants != nil {
		d.rest = append(slices.Clone(d.rest), constants)
	}
	return d, d.name != nil && d.help != nil
}

func field(literal *ast.CompositeLit, name string) ast.Expr {
	for _, e := range literal.Elts {
		if pair, ok := e.(*ast.KeyValueExpr); ok {
			if key, ok := pair.Key.(*ast.Ident); ok && key.Name == name {
				return pair.Value
			}
		}
	}
	return nil
}

// literals returns the string literals in expressions.
func literals(exprs []ast.Expr) (all []string) {
	for _, e := range exprs {
		ast.Inspect(e, func(n ast.Node) bool {
			if _, function := n.(*ast.FuncLit); function {
				return false
			}
			if literal, ok := n.(*ast.BasicLit); ok {
				if text, ok := constant(literal); ok {
					all = append(all, text)
				}
			}
			return true
		})
	}
	return all
}

// constant returns the value of a string literal, or of a sum of them.
func constant(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, err == nil && e.Kind == token.STRING
	case *ast.BinaryExpr:
		x, okX := constant(e.X)
		y, okY := constant(e.Y)
		return x + y, okX && okY && e.Op == token.ADD
	}
	return "", false
}
