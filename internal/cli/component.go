package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/cli/scaffold"
)

// ComponentCommand returns `tripod component`, which needs no node.
func (a *App) ComponentCommand() *cobra.Command {
	c := &cobra.Command{Use: "component", Short: "Begin and test components"}
	c.AddCommand(a.componentNewCommand(), a.componentGenerateCommand(), a.componentTestCommand())
	return c
}

// generateTime bounds the generation of code, most of which is the first download of the generators.
const generateTime = 10 * time.Minute

func (a *App) componentNewCommand() *cobra.Command {
	var o scaffold.Options
	c := &cobra.Command{
		Use:   "new DIRECTORY FILE.proto...",
		Short: "Write the directory of a new component that serves the services of .proto files",
		Long: "Write the directory of a new component that serves the services of .proto files: generated code, a server with a\n" +
			"body for each method, and test cases for `tripod component test`. It builds, and its test cases pass.\n\n" +
			"It needs the language's toolchain in PATH, which fetches the generators of code in fixed versions: Go, Node.js with\n" +
			"npm, Python 3.11 with venv, Rust with a target for WASI, or clang 14 with wasi-libc and Rust's cargo. protoc is not needed.",
		Example: "  tripod component new greeter greeter.proto\n" +
			"  tripod component new --lang c greeter greeter.proto\n" +
			"  tripod component new --lang js greeter greeter.proto\n" +
			"  tripod component new --lang python greeter greeter.proto\n" +
			"  tripod component new --lang rust greeter greeter.proto\n" +
			"  tripod component new --module example.com/shop/cart -I . -I third_party cart shop/v1/cart.proto",
		Args: cobra.MinimumNArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), generateTime)
			defer cancel()
			o.Dir, o.Protos, o.Progress = args[0], args[1:], a.Stderr
			if err := scaffold.New(ctx, o); err != nil {
				return err
			}
			_, err := fmt.Fprintf(a.Stdout, "%s: write the methods in %s and the test cases in %s, then run `tripod component test %s`\n",
				args[0], scaffold.Languages[o.Language], scaffold.TestsFile, args[0])
			return err
		},
	}
	f := c.Flags()
	f.StringVar(&o.Language, "lang", "go", "language of the component: c, go, js, python or rust")
	f.StringSliceVarP(&o.ImportPaths, "proto-path", "I", nil, "search path of imports (default: the files' directories)")
	f.StringVar(&o.Module, "module", "", "path of the Go module (default: example.com/NAME)")
	f.StringVar(&o.SDK, "sdk", "", "directory with "+scaffold.SDKModule+" (default: its latest version is fetched)")
	return c
}

func (a *App) componentGenerateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "generate [DIRECTORY]",
		Short: "Generate the code again after changes in the directory's .proto files",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), generateTime)
			defer cancel()
			return scaffold.Generate(ctx, directoryOf(args), a.Stderr)
		},
	}
}

// directoryOf returns the optional argument, or the working directory.
func directoryOf(args []string) string {
	if len(args) == 0 {
		return "."
	}
	return args[0]
}

func (a *App) componentTestCommand() *cobra.Command {
	t := componentTest{app: a}
	c := &cobra.Command{
		Use:   "test [DIRECTORY|FILE]",
		Short: "Run the test cases of a component in a worker, without a node",
		Long: "Run the test cases of a gRPC component in a worker (tripod-wasm), without a node. A directory is built like by\n" +
			"`tripod push`. The component has no files, and cannot open connections. As root, the worker runs as the user of\n" +
			"the node's workers, in namespaces of its own.\n\n" +
			"The cases are in tests.yaml of the directory, or beside the file:\n\n" +
			"  env: {LANGUAGE: en}                   # environment of the component\n" +
			"  cases:\n" +
			"  - name: greets\n" +
			"    method: greet.v1.Greeter/SayHello\n" +
			"    metadata: {x-request-id: \"1\"}       # to send\n" +
			"    requests: [{name: Ada}]             # one, or any number if the client streams\n" +
			"    responses: [{message: \"Hello, Ada!\"}]\n" +
			"    header: {x-request-id: \"1\"}         # expected metadata, also trailer\n" +
			"  - name: refuses an empty name\n" +
			"    method: greet.v1.Greeter/SayHello\n" +
			"    requests: [{}]\n" +
			"    code: INVALID_ARGUMENT              # expected status, also message; default OK\n" +
			"    timeout: 2s                         # default 10s",
		Example: "  tripod component test\n" +
			"  tripod component test --run '^greets' ./greeter\n" +
			"  tripod component test app.wasm --proto greeter.proto -o json",
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), t.timeout)
			defer cancel()
			return t.command(ctx, directoryOf(args))
		},
	}
	f := c.Flags()
	t.flags(f)
	f.StringVar(&t.cases, "tests", "", "file with the cases (default: "+scaffold.TestsFile+")")
	f.StringVar(&t.pattern, "run", "", "run only the cases whose names match this regular expression")
	f.BoolVar(&t.profile, "profile", false,
		"show where the component is in each case that passes: in the first call of an instance, and in the second")
	f.DurationVar(&t.timeout, "timeout", 10*time.Minute, "timeout of the build, the compilation and all cases together")
	a.outputFlag(c, f, formatTable, formatJSON, formatYAML)
	return c
}

// casesFile returns the file with the cases of a component.
func (t *componentTest) casesFile(component string) (string, error) {
	if t.cases != "" {
		return t.cases, nil
	}
	info, err := os.Stat(component)
	if err != nil {
		return "", err
	}
	if !info.IsDir() {
		component = filepath.Dir(component)
	}
	return filepath.Join(component, scaffold.TestsFile), nil
}
