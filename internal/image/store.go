package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/containerd/platforms"
	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/tripod-run/tripod/internal/guard"
)

// Names inside the metadata.
const (
	namespace   = "tripod"
	snapshotter = "overlayfs"
)

// lockTimeout is how long Open waits for another process to let go of the store: a daemon that is just ending.
const lockTimeout = 2 * time.Second

// Store is the image store. Its methods may be called from many goroutines.
type Store struct {
	cfg      Config
	platform platforms.MatchComparer
	pinned   map[string]bool
	logger   *log.Entry

	bolt    *bolt.DB
	db      *metadata.DB
	blobs   content.Store // the files, below the metadata
	content content.Store
	overlay snapshots.Snapshotter // the directories, below the metadata
	snaps   snapshots.Snapshotter
	records images.Store
	leases  leases.Manager

	// change is held over a change of records and index together.
	change  sync.Mutex
	index   index
	flights flights
	once    keyed
	pulls   pullLeases
	usage   usageCache
	fs      fsCache

	// machines has what Machine found, by image ID; the images it is about never change.
	machines  sync.Map
	translate Translation // with the prefix as full references have it
	boot      string
	verified  verified

	// base ends with Close; background work runs under it.
	base   context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	kick   chan struct{}
}

// Open opens the store at cfg.Root, making it when it is not there. Images whose blobs or layers did not survive a
// crash are left out, so that they are pulled again; what is sound of them is kept for that pull.
// A store that another process has open is errdefs.ErrFailedPrecondition.
func Open(ctx context.Context, cfg Config) (_ *Store, err error) {
	cfg.setDefaults()
	setGlobals()
	s := &Store{cfg: cfg, kick: make(chan struct{}, 1), logger: bridge(cfg.Logger)}
	s.flights.all, s.flights.log = map[string]*flight{}, cfg.Logger
	s.once.locks = map[string]*keyedLock{}
	s.usage.init()
	s.pulls.inUse = map[string]int{}
	if s.platform, s.pinned, err = cfg.check(); err != nil {
		return nil, err
	}
	s.translate.Dir = cfg.Translation.Dir
	if s.translate.Prefix, err = normalPrefix(cfg.Translation.Prefix); err != nil {
		return nil, err
	}
	if s.boot, err = bootID(); err != nil {
		return nil, fmt.Errorf("image store: which boot this is: %w", err)
	}
	s.base, s.cancel = context.WithCancel(s.with(context.WithoutCancel(ctx)))
	defer func() {
		if err != nil {
			err = fmt.Errorf("open the image store %s: %w", cfg.Root, errors.Join(err, s.Close()))
		}
	}()
	if err := s.wire(); err != nil {
		return nil, err
	}
	if err := s.dropOrphans(s.with(ctx)); err != nil {
		return nil, err
	}
	if err := s.db.Init(s.with(ctx)); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	if err := s.load(s.with(ctx)); err != nil {
		return nil, err
	}
	s.wg.Go(guard.Loop(cfg.Logger, "image collector", s.collectLoop))
	s.wg.Go(guard.Loop(cfg.Logger, "image usage", s.usageLoop))
	s.Kick()
	return s, nil
}

// wire opens the parts of containerd and puts them together.
func (s *Store) wire() (err error) {
	root := s.cfg.Root
	// The parts would make some of these for everybody to read.
	for _, dir := range []string{"", "content", "content/ingest", "content/blobs", "content/blobs/sha256", "snapshots", "snapshots/snapshots"} {
		dir = filepath.Join(root, dir)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o700); err != nil {
			return err
		}
	}
	s.bolt, err = bolt.Open(filepath.Join(root, "metadata.db"), 0o600, &bolt.Options{Timeout: lockTimeout, NoStatistics: true})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return fmt.Errorf("another process has it open: %w", errdefs.ErrFailedPrecondition)
	} else if err != nil {
		return fmt.Errorf("metadata.db: %w", err)
	}
	if err := dropNameless(filepath.Join(root, "content", "ingest")); err != nil {
		return fmt.Errorf("content: %w", err)
	}
	if s.blobs, err = local.NewStore(filepath.Join(root, "content")); err != nil {
		return fmt.Errorf("content: %w", err)
	}
	// Removing a snapshot deletes no files: the collector's clean-up does, off everybody's path.
	if s.overlay, err = overlay.NewSnapshotter(filepath.Join(root, "snapshots"), overlay.AsynchronousRemove); err != nil {
		return fmt.Errorf("overlayfs snapshots: %w", err)
	}
	s.db = metadata.NewDB(s.bolt, s.blobs, map[string]snapshots.Snapshotter{snapshotter: s.overlay})
	s.content = s.db.ContentStore()
	s.snaps = s.db.Snapshotter(snapshotter)
	s.records = metadata.NewImageStore(s.db)
	s.leases = metadata.NewLeaseManager(s.db)
	return nil
}

// dropOrphans removes the directories of snapshots that are in no record. One that a crash left between making it and writing
// it down has the number of the next snapshot, which could never be made.
func (s *Store) dropOrphans(ctx context.Context) error {
	cleaner, ok := s.overlay.(snapshots.Cleaner)
	if !ok {
		return fmt.Errorf("overlayfs snapshots cannot be cleaned: %w", errdefs.ErrNotImplemented)
	}
	err := cleaner.Cleanup(ctx)
	if errdefs.IsNotFound(err) { // there has never been a record
		dir := filepath.Join(s.cfg.Root, "snapshots", "snapshots")
		if err = os.RemoveAll(dir); err == nil {
			err = os.Mkdir(dir, 0o700)
		}
	}
	if err != nil {
		return fmt.Errorf("clean overlayfs snapshots: %w", err)
	}
	return nil
}

// Close ends the pulls under way, which can be resumed, and closes the files. Root filesystems stay mounted.
func (s *Store) Close() error {
	s.cancel()
	s.flights.wg.Wait()
	s.wg.Wait()
	var errs []error
	if s.overlay != nil {
		errs = append(errs, s.overlay.Close())
	}
	if s.bolt != nil {
		errs = append(errs, s.bolt.Close())
	}
	return errors.Join(errs...)
}

// with gives ctx what containerd's parts expect of one.
func (s *Store) with(ctx context.Context) context.Context {
	return log.WithLogger(namespaces.WithNamespace(ctx, namespace), s.logger)
}
