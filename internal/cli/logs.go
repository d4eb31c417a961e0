package cli

import "github.com/spf13/cobra"

func (a *App) logCommands() []*cobra.Command { return nil }
