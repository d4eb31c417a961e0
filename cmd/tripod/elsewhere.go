package main

import (
	"errors"

	"github.com/spf13/cobra"
)

// elsewhere has the commands that users of docker, kubectl and crictl type and that have another name here.
var elsewhere = map[string]string{
	"apply":     "`tripod run -f FILE` runs the pods of a manifest",
	"build":     "build images with buildah or docker, and those of components with `tripod push`",
	"container": "`tripod ps`, `tripod inspect`, `tripod logs`, `tripod rm` and others are for containers",
	"cp":        "`tripod exec POD -- tar c -C / PATH | tar x` copies from a container",
	"delete":    "`tripod rmp -f POD`, `tripod rm -f CONTAINER` or `tripod rmi IMAGE`",
	"describe":  "`tripod inspectp POD`, `tripod inspect CONTAINER` or `tripod inspecti IMAGE`",
	"get":       "`tripod pods`, `tripod ps` for containers, or `tripod images`",
	"image":     "`tripod images`, `tripod pull`, `tripod inspecti` and `tripod rmi` are for images",
	"kill":      "`tripod stop --grace 0 CONTAINER`",
	"login":     "write the login to a docker config, which `image.docker_config` in the node's configuration names",
	"network":   "networks are the CNI configuration's; `tripod pods -o wide` has the addresses",
	"pod":       "`tripod pods`, `tripod inspectp`, `tripod stopp` and `tripod rmp` are for pods",
	"restart":   "`tripod stop CONTAINER`, then `tripod run` again; a kubelet restarts the containers of its pods",
	"volume":    "`tripod run -v /HOST-PATH:/CONTAINER-PATH`, or volumes in a manifest (`tripod run -f FILE`)",
}

// elsewhereCommands makes a hidden command of each of these, which says what to type instead.
func elsewhereCommands() (all []*cobra.Command) {
	for name, instead := range elsewhere {
		all = append(all, &cobra.Command{
			Use: name, Hidden: true, DisableFlagParsing: true, Short: "Say what to type instead",
			RunE: func(*cobra.Command, []string) error { return errors.New("there is no such command; " + instead) },
		})
	}
	return all
}
