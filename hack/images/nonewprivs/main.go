// Command nonewprivs prints its effective user ID. Its file is set-user-ID root in the image, so a process that
// may gain privileges sees 0.
package main

import (
	"fmt"
	"os"
)

func main() { fmt.Printf("Effective uid: %d\n", os.Geteuid()) }
