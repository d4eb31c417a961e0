package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/boltfile"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/share"
	"github.com/tripod-run/tripod/internal/image/policy"
	"github.com/tripod-run/tripod/internal/synced"
	"github.com/tripod-run/tripod/internal/tlsfile"
)

// Names in the metadata.
const (
	namespace   = "tripod"
	snapshotter = "overlayfs"
)

// reopenFirst and reopenLast are the shortest and longest pauses between two attempts to open the store.
const (
	reopenFirst = time.Second
	reopenLast  = 30 * time.Second
)

// Store is the image store. Its methods are safe for concurrent use.
type Store struct {
	cfg      Config
	platform platforms.MatchComparer
	pinned   map[string]bool
	logger   *log.Entry

	// notOpen is the reason why the store cannot be used. Once it is nil it stays nil, and the fields below are valid.
	notOpen atomic.Pointer[error]

	bolt    *bolt.DB
	db      *metadata.DB
	blobs   content.Store // the blob files, without metadata
	content content.Store
	overlay snapshots.Snapshotter // the snapshot directories, without metadata
	meta    *storage.MetaStore    // the snapshotter's own metadata
	snaps   snapshots.Snapshotter
	records images.Store
	leases  leases.Manager

	// change is locked while the records and the index change together.
	change    sync.Mutex
	index     index
	flights   flights[Image]              // pulls
	rootDisks flights[ocispec.Descriptor] // see OpenRootDisk
	locks     keyedMutex
	pulls     pullLeases
	usage     usageCache
	layers    writableLayers
	fs        fsCache

	// unwatch ends the counts of synced writes in the open files.
	unwatch []func()

	// machines caches Machine's results by image ID; images are immutable.
	machines  sync.Map
	peers     *share.Peers
	translate Translation // with the prefix in the form of full references
	boot      string      // boot ID of the kernel
	verified  verified

	// badBlobs holds digests of blobs, and badLayers holds chain IDs of layers. Verify or OpenOptionalBlob found wrong content in these,
	// and a pull fetches them again. The sets are separate, because the chain ID of the lowest layer can equal its
	// blob's digest.
	badBlobs, badLayers sync.Map
	// dropped holds the images that Open dropped: it maps the name of each to the reason.
	dropped sync.Map

	// watchers are the channels that Changes has returned.
	watchers watchers

	// base is the context of background work; Close cancels it.
	base   context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	kick   chan struct{}
}

// Open opens the store at cfg.Root, or creates it. It drops images whose blobs or layers did not survive a crash, so
// that they are pulled again, and keeps their intact parts for that pull. If another process has the store open, the
// error is errdefs.ErrFailedPrecondition.
//
// If the disk is read-only or failing, or the metadata is damaged, Open still returns a store and no error, because
// containers on the node can run without images. That store is not open: Err and every method return the reason until a
// retry opens it. Nothing changes on disk until then.
func Open(ctx context.Context, cfg Config) (_ *Store, err error) {
	cfg.setDefaults()
	setGlobals()
	s := &Store{cfg: cfg, kick: make(chan struct{}, 1), logger: bridge(cfg.Logger)}
	s.flights.init(cfg.Logger, "image pull")
	s.rootDisks.init(cfg.Logger, "root disk")
	s.locks.byKey = map[string]*keyedLock{}
	s.usage.byKey, s.usage.work = map[string]*usageEntry{}, make(chan string, 4096)
	s.pulls.inUse = map[string]int{}
	s.layers.sweep = make(chan struct{}, 1)
	if s.platform, s.pinned, err = cfg.check(); err != nil {
		return nil, err
	}
	if s.peers, err = share.NewPeers(cfg.Peers.Hosts, cfg.Peers.CA,
		tlsfile.Pair{Certificate: cfg.Peers.Certificate, Key: cfg.Peers.Key}); err != nil {
		return nil, err
	}
	s.translate.Dir = cfg.Translation.Dir
	if s.translate.Prefix, err = normalPrefix(cfg.Translation.Prefix); err != nil {
		return nil, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("image store: boot ID: %w", err)
	}
	s.boot = strings.TrimSpace(string(boot))
	s.base, s.cancel = context.WithCancel(s.withNamespace(context.WithoutCancel(ctx)))
	err = s.open(ctx)
	switch {
	case err == nil:
	case errdefs.IsFailedPrecondition(err), ctx.Err() != nil:
		return nil, errors.Join(err, s.Close())
	default:
		s.wg.Go(guard.Loop(cfg.Logger, "image store", s.reopenLoop))
	}
	return s, nil
}

// open opens the files and reads their content. After an error no file is open, and Err returns the error.
func (s *Store) open(ctx context.Context) (err error) {
	ctx = s.withNamespace(ctx)
	defer func() {
		if err == nil {
			s.notOpen.Store(nil)
			return
		}
		err = fmt.Errorf("open the image store %s: %w", s.cfg.Root, errors.Join(err, s.closeFiles()))
		s.notOpen.Store(&err)
	}()
	if err := s.openParts(); err != nil {
		return err
	}
	if err := s.dropOrphans(ctx); err != nil {
		return err
	}
	if err := s.db.Init(ctx); err != nil {
		return fmt.Errorf("metadata: %w", err)
	}
	s.index.reset()
	if err := s.openLayers(ctx); err != nil {
		return fmt.Errorf("layers of containers: %w", err)
	}
	if err := s.load(ctx); err != nil {
		return err
	}
	if err := s.dropFoundations(ctx); err != nil {
		return err
	}
	if s.cfg.SignaturePolicy != "" {
		if _, err := policy.Load(s.cfg.SignaturePolicy); err != nil {
			s.cfg.Logger.ErrorContext(ctx, "no image can be pulled", "err", err)
		}
	}
	s.wg.Go(guard.Func(s.cfg.Logger, "image check", s.verifyAtStart))
	s.wg.Go(guard.Loop(s.cfg.Logger, "image collector", s.collectLoop))
	s.wg.Go(guard.Loop(s.cfg.Logger, "image usage", s.usageLoop))
	s.wg.Go(guard.Loop(s.cfg.Logger, "removal of containers' layers", s.sweepLoop))
	s.Kick()
	s.watchers.notify()
	return nil
}

// reopenLoop tries to open the store until it succeeds.
func (s *Store) reopenLoop() {
	for pause := reopenFirst; ; pause = min(2*pause, reopenLast) {
		select {
		case <-time.After(pause):
		case <-s.base.Done():
			return
		}
		if err := s.open(s.base); err == nil {
			s.cfg.Logger.Info("image store opened")
			return
		}
	}
}

// Err returns nil, or the reason why the store cannot be used. The reason is errdefs.ErrDataLoss if the store's
// metadata is damaged.
func (s *Store) Err() error {
	if why := s.notOpen.Load(); why != nil {
		return *why
	}
	return nil
}

// ErrNotOpen is wrapped by the error of every method while the store is not open.
var ErrNotOpen = errors.New("the image store cannot be used")

// ready returns nil if the store is open, otherwise the error that every method returns.
func (s *Store) ready() error {
	err := s.Err()
	switch {
	case err == nil:
		return nil
	case errdefs.IsDataLoss(err):
		return fmt.Errorf("%w: %v: %w", ErrNotOpen, err, errdefs.ErrFailedPrecondition)
	default:
		return fmt.Errorf("%w: %v: %w", ErrNotOpen, err, errdefs.ErrUnavailable)
	}
}

// openParts opens containerd's parts and connects them.
func (s *Store) openParts() (err error) {
	root := s.cfg.Root
	// containerd would make some of these directories world-readable.
	for _, dir := range []string{"", "content", "content/ingest", "content/blobs", "content/blobs/sha256", "snapshots",
		"snapshots/snapshots"} {
		dir = filepath.Join(root, dir)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o700); err != nil {
			return err
		}
	}
	if err := s.openMetadata(); err != nil {
		return err
	}
	if err := dropNameless(filepath.Join(root, "content", "ingest")); err != nil {
		return fmt.Errorf("content: %w", err)
	}
	if s.blobs, err = local.NewStore(filepath.Join(root, "content")); err != nil {
		return fmt.Errorf("content: %w", err)
	}
	// With AsynchronousRemove, the removal of a snapshot deletes only its record; the collector deletes the files
	// later.
	if s.meta, err = storage.NewMetaStore(filepath.Join(root, snapshotsFile)); err != nil {
		return fmt.Errorf("overlayfs snapshots: %w", err)
	}
	if s.overlay, err = overlay.NewSnapshotter(filepath.Join(root, "snapshots"), overlay.AsynchronousRemove,
		overlay.WithMetaStore(s.meta)); err != nil {
		return fmt.Errorf("overlayfs snapshots: %w", err)
	}
	s.unwatch = []func(){synced.Watch(synced.Transactions(s.bolt)), synced.Watch(s.snapshotTransactions)}
	s.db = metadata.NewDB(s.bolt, s.blobs, map[string]snapshots.Snapshotter{snapshotter: s.overlay})
	s.content = s.db.ContentStore()
	s.snaps = s.db.Snapshotter(snapshotter)
	s.records = metadata.NewImageStore(s.db)
	s.leases = metadata.NewLeaseManager(s.db)
	return nil
}

// snapshotTransactions returns the ID of the last transaction in the snapshotter's own metadata.
func (s *Store) snapshotTransactions() (int, error) {
	_, tx, err := s.meta.TransactionContext(context.Background(), false)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback() }()
	bolt, ok := tx.(*bolt.Tx)
	if !ok {
		return 0, fmt.Errorf("a transaction of type %T: %w", tx, errdefs.ErrNotImplemented)
	}
	return bolt.ID(), nil
}

// metadataFile contains the image records, leases and references. snapshotsFile is the snapshotter's own file; it maps
// snapshots to directories.
const (
	metadataFile  = "metadata.db"
	snapshotsFile = "snapshots/metadata.db"
)

// openMetadata checks both metadata files before their use, because everything that they do not list is removed,
// including containers' directories. A missing file beside existing content counts as damaged.
func (s *Store) openMetadata() error {
	for _, listed := range []struct{ file, dir string }{
		{metadataFile, "content/blobs/sha256"}, {metadataFile, "snapshots/snapshots"}, {snapshotsFile, "snapshots/snapshots"},
	} {
		if err := s.refuseLost(listed.file, listed.dir); err != nil {
			return err
		}
	}
	db, _, err := boltfile.Open(filepath.Join(s.cfg.Root, snapshotsFile), boltfile.Options{})
	if err == nil {
		err = db.Close() // the snapshotter opens it itself
	}
	if err == nil {
		s.bolt, _, err = boltfile.Open(filepath.Join(s.cfg.Root, metadataFile), boltfile.Options{Recognize: s.recognize})
	}
	if errdefs.IsUnavailable(err) {
		return fmt.Errorf("another process has it open: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if errdefs.IsDataLoss(err) {
		return fmt.Errorf("%w; nothing was changed: %s", err, s.remedy())
	}
	return err
}

// recognize checks that a valid database belongs to the store: it must have containerd's bucket "v1", or be empty while
// there are no blobs.
func (s *Store) recognize(tx *bolt.Tx) error {
	if tx.Bucket([]byte("v1")) != nil {
		return nil
	}
	if name, _ := tx.Cursor().First(); name != nil {
		return errors.New("belongs to another program")
	}
	entries, err := os.ReadDir(filepath.Join(s.cfg.Root, "content", "blobs", "sha256"))
	if err == nil && len(entries) > 0 {
		err = errors.New("has lost its content")
	}
	return err
}

// remedy returns the instructions for lost metadata.
func (s *Store) remedy() string {
	return fmt.Sprintf("restore an intact copy of it, which is then opened; or, to give up the images, drain the node, stop tripod, remove %s and start tripod: "+
		"all images are pulled again", s.cfg.Root)
}

// refuseLost returns an error if a metadata file is missing but the directory that it should describe is not empty.
func (s *Store) refuseLost(file, dir string) error {
	if _, err := os.Lstat(filepath.Join(s.cfg.Root, file)); !failure.IsGone(err) {
		return err
	}
	entries, err := os.ReadDir(filepath.Join(s.cfg.Root, dir))
	if err != nil || len(entries) == 0 {
		return err
	}
	return fmt.Errorf("%s does not exist, while %s has %d entries: %w; nothing was changed: %s",
		filepath.Join(s.cfg.Root, file), filepath.Join(s.cfg.Root, dir), len(entries), errdefs.ErrDataLoss, s.remedy())
}

// Writable returns errdefs.ErrUnavailable if the store's file system is not writable. It does not write.
func (s *Store) Writable() error {
	if err := unix.Access(s.cfg.Root, unix.W_OK); err != nil {
		return fmt.Errorf("the image store %s cannot be written: %w: %w", s.cfg.Root, err, errdefs.ErrUnavailable)
	}
	return nil
}

// dropOrphans removes snapshot directories without a record. A directory that a crash left behind can have the number
// of the next snapshot, and that snapshot could then never be made.
func (s *Store) dropOrphans(ctx context.Context) error {
	cleaner, ok := s.overlay.(snapshots.Cleaner)
	if !ok {
		return fmt.Errorf("overlayfs snapshots cannot be cleaned: %w", errdefs.ErrNotImplemented)
	}
	err := cleaner.Cleanup(ctx)
	if errdefs.IsNotFound(err) { // there are no records yet
		dir := filepath.Join(s.cfg.Root, "snapshots", "snapshots")
		if err = os.RemoveAll(dir); err == nil {
			err = os.Mkdir(dir, 0o700)
		}
	}
	if err != nil {
		return fmt.Errorf("clean overlayfs snapshots: %w", err)
	}
	if err := s.reserve(); err != nil { // calls that need the space return the error
		s.cfg.Logger.WarnContext(ctx, "no disk space for changes of the image store's metadata", "err", err)
	}
	return nil
}

// Close cancels the pulls under way, which can be resumed, and the root disks being made, and closes the files. Root filesystems
// stay mounted.
func (s *Store) Close() error {
	s.cancel()
	s.flights.wg.Wait()
	s.rootDisks.wg.Wait()
	s.wg.Wait()
	return s.closeFiles()
}

func (s *Store) closeFiles() error {
	for _, unwatch := range s.unwatch {
		unwatch()
	}
	var errs []error
	if s.overlay != nil {
		errs = append(errs, s.overlay.Close())
	} else if s.meta != nil {
		errs = append(errs, s.meta.Close())
	}
	if s.bolt != nil {
		errs = append(errs, s.bolt.Close())
	}
	s.overlay, s.meta, s.bolt, s.unwatch = nil, nil, nil, nil
	return errors.Join(errs...)
}

// withNamespace returns ctx with the namespace and the logger that containerd's parts expect.
func (s *Store) withNamespace(ctx context.Context) context.Context {
	return log.WithLogger(namespaces.WithNamespace(ctx, namespace), s.logger)
}
