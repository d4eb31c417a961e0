// Package failure has the errors that the rooms of the image store share: their classes, and texts without secrets.
//
// It must not know what failed: the caller says that.
package failure
