package libvirt

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"
)

// classes maps libvirt's error numbers (virterror.h) to errdefs classes. All other numbers become errdefs.ErrInternal.
var classes = map[golibvirt.ErrorNumber]error{
	golibvirt.ErrNoMemory:             errdefs.ErrResourceExhausted,
	golibvirt.ErrNoSupport:            errdefs.ErrNotImplemented,
	golibvirt.ErrOperationUnsupported: errdefs.ErrNotImplemented,
	golibvirt.ErrInvalidArg:           errdefs.ErrInvalidArgument,
	golibvirt.ErrXMLError:             errdefs.ErrInvalidArgument,
	golibvirt.ErrXMLDetail:            errdefs.ErrInvalidArgument,
	golibvirt.ErrXMLInvalidSchema:     errdefs.ErrInvalidArgument,
	golibvirt.ErrConfigUnsupported:    errdefs.ErrInvalidArgument,
	golibvirt.ErrArgumentUnsupported:  errdefs.ErrInvalidArgument,
	golibvirt.ErrDomExist:             errdefs.ErrAlreadyExists,
	golibvirt.ErrOperationDenied:      errdefs.ErrPermissionDenied,
	golibvirt.ErrAuthFailed:           errdefs.ErrPermissionDenied,
	golibvirt.ErrAccessDenied:         errdefs.ErrPermissionDenied,
	golibvirt.ErrNoDomain:             errdefs.ErrNotFound,
	golibvirt.ErrOperationInvalid:     errdefs.ErrFailedPrecondition,
	golibvirt.ErrOperationFailed:      errdefs.ErrFailedPrecondition,
	golibvirt.ErrInternalError:        errdefs.ErrFailedPrecondition, // libvirt's number for errors from QEMU
	golibvirt.ErrSystemError:          errdefs.ErrFailedPrecondition,
	golibvirt.ErrOperationTimeout:     errdefs.ErrUnavailable,
	golibvirt.ErrOperationAborted:     errdefs.ErrUnavailable,
	golibvirt.ErrRPC:                  errdefs.ErrUnavailable,
}

// classify adds the failed operation and an errdefs class to an error from libvirt.
func classify(what string, err error) error {
	if err == nil {
		return nil
	}
	var libvirtErr golibvirt.Error
	if errors.As(err, &libvirtErr) {
		class, ok := classes[golibvirt.ErrorNumber(libvirtErr.Code)]
		if !ok {
			class = errdefs.ErrInternal
		}
		return fmt.Errorf("%s: libvirt: %s: %w", what, libvirtErr.Message, class)
	}
	var netErr net.Error
	if errors.Is(err, golibvirt.ErrInterrupted) || errors.Is(err, syscall.EINVAL) || errors.Is(err, io.EOF) || errors.As(err, &netErr) {
		return fmt.Errorf("%s: the connection to libvirtd broke: %w: %w", what, err, errdefs.ErrUnavailable)
	}
	return fmt.Errorf("%s: %w: %w", what, err, errdefs.ErrInternal)
}
