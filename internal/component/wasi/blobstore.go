package wasi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Limits of wasi:blobstore: of a value in one piece, in bytes, and of the names in a call.
const (
	maxBlob      = 4 << 20
	maxBlobNames = 1000
)

var (
	errNoBlobs    = errors.New("the pod has no volume for objects")
	errBlobRange  = errors.New("the range is not valid")
	errBlobSize   = fmt.Errorf("the value is larger than %d bytes; read it as a stream", maxBlob)
	errBlobNames  = fmt.Errorf("there are more than %d names", maxBlobNames)
	errBlobTarget = errors.New("the value already belongs to an object")
	errNoTarget   = errors.New("the value belongs to no object")
)

// blobContainer is the resource container. Each function opens the directory again, so it holds no file.
type blobContainer struct{ name string }

// outgoingBlob is the resource outgoing-value. Its file is made with the first byte. The object appears when the guest
// finishes the value, whether it has called write-data before or after it wrote the bytes.
type outgoingBlob struct {
	state           *State
	upload          *upload // nil before the first byte
	streamed, ended bool
	container, name string // the object, after write-data
	err             error  // the first one of a write
}

// Write implements io.Writer for the guest's stream.
func (o *outgoingBlob) Write(p []byte) (int, error) {
	if o.ended {
		return 0, io.ErrClosedPipe
	}
	if o.err == nil {
		o.err = o.begin()
	}
	if o.err != nil {
		return 0, o.err
	}
	n, err := o.upload.file.Write(p)
	if err != nil {
		o.err = errors.New(blobText(err))
	}
	return n, o.err
}

// begin makes the file, unless there is one. The error is for the guest.
func (o *outgoingBlob) begin() error {
	switch {
	case o.upload != nil:
		return nil
	case o.state.options.Blobs == nil:
		return errNoBlobs
	case !o.state.openMore(1):
		return unix.EMFILE
	}
	u, err := o.state.options.Blobs.begin()
	if err != nil {
		o.state.openMore(-1)
		return errors.New(blobText(err))
	}
	o.upload = u
	return nil
}

// Close is called when the guest finishes or drops the value.
func (o *outgoingBlob) Close() error {
	o.ended = true
	if o.upload != nil {
		o.state.openMore(-1)
		o.upload.close()
		o.upload = nil
	}
	return nil
}

// finish makes the object appear.
func (o *outgoingBlob) finish() error {
	defer o.Close()
	switch {
	case o.err != nil:
		return o.err
	case o.container == "":
		return errNoTarget
	}
	if err := o.begin(); err != nil {
		return err
	}
	return o.upload.commit(o.container, o.name)
}

// incomingBlob is the resource incoming-value: a part of an object. A new object of the same name does not change it.
type incomingBlob struct {
	state    *State
	file     *os.File
	at, size int64
}

// Close is called when the guest drops the value, or the stream of its bytes.
func (i *incomingBlob) Close() error {
	i.state.openMore(-1)
	return i.file.Close()
}

func (i *incomingBlob) bytes() io.ReaderAt { return io.NewSectionReader(i.file, i.at, i.size) }

// objectNames is the resource stream-object-names.
type objectNames struct {
	state *State
	dir   *os.File
}

// Close closes the directory.
func (o *objectNames) Close() error {
	o.state.openMore(-1)
	return o.dir.Close()
}

// blobs makes a function from one that writes its ok result. If do returns an error, the result is that error; only an
// error of the host itself ends the guest's call.
func blobs(do func(c *holding, b *Blobs) error) Func {
	return func(call *Call) error {
		c := &holding{Call: call}
		defer c.release()
		err := errNoBlobs
		if b := c.options.Blobs; b != nil {
			err = do(c, b)
		}
		if err == nil {
			return nil
		}
		if ended := c.ends(err); ended != nil {
			return ended
		}
		c.Out = c.Out[:0]
		c.Failed()
		c.Out = wit.AppendString(c.Out, blobText(err))
		return nil
	}
}

// inContainer makes a method of container.
func inContainer(do func(c *holding, b *Blobs, container string) error) Func {
	return func(call *Call) error {
		in, err := Get[*blobContainer](call.State, call.In.U32())
		if err != nil {
			return err
		}
		return blobs(func(c *holding, b *Blobs) error { return do(c, b, in.name) })(call)
	}
}

// openFile counts an open file of a resource, and opens it.
func (c *Call) openFile(open func() (*os.File, error)) (*os.File, error) {
	if !c.openMore(1) {
		return nil, unix.EMFILE
	}
	file, err := open()
	if err != nil {
		c.openMore(-1)
	}
	return file, err
}

func getData(c *holding, b *Blobs, container string) error {
	name, start, end := c.In.String(), c.In.U64(), c.In.U64()
	if start > end || start > math.MaxInt64 {
		return errBlobRange
	}
	file, err := c.openFile(func() (*os.File, error) { return b.read(container, name) })
	if err != nil {
		return err
	}
	value := &incomingBlob{state: c.State, file: file, at: int64(start)}
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() {
		_ = value.Close()
		return errors.Join(err, errNotObject)
	}
	last := uint64(max(info.Size(), 1) - 1)
	if value.size = int64(min(end, last)) - value.at + 1; value.at >= info.Size() {
		value.size = 0
	}
	c.OK()
	c.Own(value)
	return nil
}

func writeData(c *holding, b *Blobs, container string) error {
	name := c.In.String()
	value, err := Get[*outgoingBlob](c.State, c.In.U32())
	switch {
	case err != nil:
		return err
	case !isBlobName(name):
		return errBlobName
	case value.container != "":
		return errBlobTarget
	}
	return c.done(nil, func() error {
		return b.in(container, func(*os.Root) error {
			value.container, value.name = container, name
			return nil
		})
	})
}

func listObjects(c *holding, b *Blobs, container string) error {
	dir, err := c.openFile(func() (dir *os.File, err error) {
		err = b.in(container, func(root *os.Root) error {
			dir, err = root.Open(container)
			return err
		})
		return dir, err
	})
	if err != nil {
		return err
	}
	c.OK()
	c.Own(&objectNames{c.State, dir})
	return nil
}

func deleteObjects(c *holding, b *Blobs, container string) error {
	n := c.In.Len()
	if n > maxBlobNames {
		return errBlobNames
	}
	for range n {
		if c.Err() != nil {
			return context.Cause(c)
		}
		if err := b.delete(container, c.In.String()); err != nil {
			return err
		}
	}
	c.OK()
	return nil
}

func objectInfo(c *holding, b *Blobs, container string) error {
	name := c.In.String()
	return b.in(container, func(root *os.Root) error {
		info, err := object(root, container, name)
		if err != nil {
			return err
		}
		c.OK()
		c.Out = wit.AppendString(wit.AppendString(c.Out, name), container)
		c.Out = wit.AppendU64(wit.AppendU64(c.Out, uint64(info.ModTime().Unix())), uint64(info.Size()))
		return nil
	})
}

var containerFuncs = map[string]Func{
	"[method]container.name": inContainer(func(c *holding, _ *Blobs, container string) error {
		c.OK()
		c.Out = wit.AppendString(c.Out, container)
		return nil
	}),
	"[method]container.info": inContainer(func(c *holding, b *Blobs, container string) error {
		made, err := b.created(container)
		c.OK()
		c.Out = wit.AppendU64(wit.AppendString(c.Out, container), uint64(made.Unix()))
		return err
	}),
	"[method]container.get-data":     inContainer(getData),
	"[method]container.write-data":   inContainer(writeData),
	"[method]container.list-objects": inContainer(listObjects),
	"[method]container.delete-object": inContainer(func(c *holding, b *Blobs, container string) error {
		return c.done(nil, func() error { return b.delete(container, c.In.String()) })
	}),
	"[method]container.delete-objects": inContainer(deleteObjects),
	"[method]container.has-object": inContainer(func(c *holding, b *Blobs, container string) error {
		name, has := c.In.String(), true
		err := b.in(container, func(root *os.Root) error {
			_, err := object(root, container, name)
			return err
		})
		if errors.Is(err, errNoObject) || errors.Is(err, errNotObject) {
			has, err = false, nil
		}
		c.OK()
		c.Out = wit.AppendBool(c.Out, has)
		return err
	}),
	"[method]container.object-info": inContainer(objectInfo),
	"[method]container.clear": inContainer(func(c *holding, b *Blobs, container string) error {
		return c.done(nil, func() error {
			return b.in(container, func(root *os.Root) error { return empty(c, root, container) })
		})
	}),
	"[method]stream-object-names.read-stream-object-names": blobs(func(c *holding, _ *Blobs) error {
		names, err := Get[*objectNames](c.State, c.In.U32())
		if err != nil {
			return err
		}
		var list []string
		_, end, err := objects(c, names.dir, int(min(c.In.U64(), maxBlobNames)), func(name string) error {
			list = append(list, name)
			return c.hold(len(name))
		})
		c.OK()
		c.Out = wit.AppendLen(c.Out, len(list))
		for _, name := range list {
			c.Out = wit.AppendString(c.Out, name)
		}
		c.Out = wit.AppendBool(c.Out, end)
		return err
	}),
	"[method]stream-object-names.skip-stream-object-names": blobs(func(c *holding, _ *Blobs) error {
		names, err := Get[*objectNames](c.State, c.In.U32())
		if err != nil {
			return err
		}
		n, end, err := objects(c, names.dir, int(min(c.In.U64(), math.MaxInt)), func(string) error { return nil })
		c.OK()
		c.Out = wit.AppendBool(wit.AppendU64(c.Out, uint64(n)), end)
		return err
	}),
}

var blobTypeFuncs = map[string]Func{
	"[static]outgoing-value.new-outgoing-value": func(c *Call) error {
		c.Own(&outgoingBlob{state: c.State})
		return nil
	},
	"[method]outgoing-value.outgoing-value-write-body": func(c *Call) error {
		o, err := Get[*outgoingBlob](c.State, c.In.U32())
		if err != nil {
			return err
		}
		if o.streamed {
			c.Failed()
			return nil
		}
		o.streamed = true
		if b := c.options.Blobs; b != nil {
			b.prepare(c)
		}
		c.OK()
		c.Own(&OutputStream{Output: direct{o}})
		return nil
	},
	"[static]outgoing-value.finish": blobs(func(c *holding, _ *Blobs) error {
		o, err := Take[*outgoingBlob](c.State, c.In.U32())
		if err != nil {
			return err
		}
		return c.done(nil, o.finish)
	}),
	"[static]incoming-value.incoming-value-consume-sync": blobs(func(c *holding, _ *Blobs) error {
		i, err := Take[*incomingBlob](c.State, c.In.U32())
		if err != nil {
			return err
		}
		defer i.Close()
		if i.size > maxBlob {
			return errBlobSize
		}
		if err := c.hold(int(i.size)); err != nil {
			return err
		}
		data := make([]byte, i.size)
		n, err := i.bytes().ReadAt(data, 0)
		if errors.Is(err, io.EOF) {
			err = nil // another program has shortened the file
		}
		c.OK()
		c.Out = wit.AppendBytes(c.Out, data[:n])
		return err
	}),
	"[static]incoming-value.incoming-value-consume-async": func(c *Call) error {
		i, err := Take[*incomingBlob](c.State, c.In.U32())
		if err != nil {
			return err
		}
		c.OK()
		c.Own(&InputStream{Input: &fileInput{file: i.bytes()}, release: func() { _ = i.Close() }})
		return nil
	},
	"[method]incoming-value.size": func(c *Call) error {
		i, err := Get[*incomingBlob](c.State, c.In.U32())
		if err != nil {
			return err
		}
		c.Out = wit.AppendU64(c.Out, uint64(i.size))
		return nil
	},
}

// objectID reads an object-id.
func (c *Call) objectID() (container, name string) { return c.In.String(), c.In.String() }

// openContainer makes a function that returns a container, after a check.
func openContainer(check func(b *Blobs, name string) error) Func {
	return blobs(func(c *holding, b *Blobs) error {
		name := c.In.String()
		if err := check(b, name); err != nil {
			return err
		}
		c.OK()
		c.Own(&blobContainer{name})
		return nil
	})
}

var blobstoreFuncs = map[string]Func{
	"create-container": openContainer((*Blobs).create),
	"get-container": openContainer(func(b *Blobs, name string) error {
		return b.in(name, func(*os.Root) error { return nil })
	}),
	"delete-container": blobs(func(c *holding, b *Blobs) error {
		return c.done(nil, func() error { return b.remove(c, c.In.String()) })
	}),
	"container-exists": blobs(func(c *holding, b *Blobs) error {
		err := b.in(c.In.String(), func(*os.Root) error { return nil })
		c.OK()
		c.Out = wit.AppendBool(c.Out, err == nil)
		if errors.Is(err, errNoContainer) {
			return nil
		}
		return err
	}),
	"copy-object": blobs(func(c *holding, b *Blobs) error {
		container, name := c.objectID()
		toContainer, toName := c.objectID()
		return c.done(nil, func() error { return b.copy(c, container, name, toContainer, toName) })
	}),
	"move-object": blobs(func(c *holding, b *Blobs) error {
		container, name := c.objectID()
		toContainer, toName := c.objectID()
		return c.done(nil, func() error { return b.move(container, name, toContainer, toName) })
	}),
}
