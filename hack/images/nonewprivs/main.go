// Command nonewprivs prints its effective user ID. In the image its file is set-user-ID root, so the ID is 0 if the
// process can gain privileges.
package main

import (
	"fmt"
	"os"
)

func main() { fmt.Printf("Effective uid: %d\n", os.Geteuid()) }
