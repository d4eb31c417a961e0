// Command nonewprivs prints its effective user ID. In the image, its file is set-user-ID root, so it prints 0 if a
// process can gain privileges.
package main

import (
	"fmt"
	"os"
)

func main() { fmt.Printf("Effective uid: %d\n", os.Geteuid()) }
