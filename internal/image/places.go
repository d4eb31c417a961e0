package image

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// layersName is the name of the directory below Config.ContainersDir that contains one directory for each store.
const layersName = "tripod-layers"

// With Config.ContainersDir, the files of a layer are on another file system. Which layers exist is still decided by the
// store's own directory, which is the last to change when a layer is made or released:
//
//	<root>/containers/<key>/layer.json                             names ContainersDir
//	<ContainersDir>/tripod-layers/<root, escaped>/<key>/fs, work
//	                                             /.gone-…          being removed

// checkContainersDir checks that Config.ContainersDir exists. It is not made: if its file system is not mounted yet, the
// layers would fill the file system below.
func (s *Store) checkContainersDir() error {
	if s.cfg.ContainersDir == "" {
		return nil
	}
	info, err := os.Stat(s.cfg.ContainersDir)
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is not a directory", s.cfg.ContainersDir)
	}
	if err != nil {
		return fmt.Errorf("containers_dir: %w; mount its file system, or make it: %w", err, errdefs.ErrUnavailable)
	}
	return nil
}

// place returns the directory with the files of layers that were made with this Config.ContainersDir. Everything in it
// belongs to this store.
func (s *Store) place(containers string) string {
	if containers == "" {
		return filepath.Join(s.cfg.Root, containersDir)
	}
	return filepath.Join(containers, layersName, url.PathEscape(s.cfg.Root))
}

// layerDir returns the directory with a layer's file.
func (s *Store) layerDir(key string) string { return s.filesOf(key, layerInfo{}) }

// filesOf returns the directory with a layer's fs and work.
func (s *Store) filesOf(key string, info layerInfo) string {
	return filepath.Join(s.place(info.Dir), url.PathEscape(key))
}

// discardStrays discards the files of layers that are not listed. A crash leaves them when a layer is made, and a power
// failure leaves more, because it can undo changes of one file system only.
func (s *Store) discardStrays(ctx context.Context) {
	for _, place := range s.layers.places[:len(s.layers.places)-1] {
		entries, err := os.ReadDir(place)
		if failure.IsGone(err) {
			err = nil
		}
		for _, e := range entries {
			key, badName := url.PathUnescape(e.Name())
			if _, listed := s.layers.byKey[key]; badName != nil || !listed && !strings.HasPrefix(key, ".") {
				err = errors.Join(err, discard(place, e.Name()))
			}
		}
		if err != nil {
			s.cfg.Logger.WarnContext(ctx, "cannot remove the layers that belong to no container", "path", place, "err", err)
		}
	}
}

// discardLayer discards a layer in all places: if the layer's file is damaged, it does not name the place.
func (s *Store) discardLayer(key string) error {
	for _, place := range s.layers.places {
		if err := discard(place, url.PathEscape(key)); err != nil {
			return err
		}
	}
	return nil
}

// discard renames a layer so that removeReleased removes it.
func discard(place, name string) error {
	err := os.Rename(filepath.Join(place, name), filepath.Join(place, beingRemoved+name))
	if failure.IsGone(err) {
		return nil
	}
	return err
}

// removeReleased removes the files of discarded layers, until the store is closed.
func (s *Store) removeReleased() error {
	var errs []error
	for _, place := range s.layers.places {
		entries, err := os.ReadDir(place)
		if !failure.IsGone(err) {
			errs = append(errs, err)
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), beingRemoved) && s.base.Err() == nil {
				errs = append(errs, os.RemoveAll(filepath.Join(place, e.Name())))
			}
		}
	}
	return errors.Join(errs...)
}
