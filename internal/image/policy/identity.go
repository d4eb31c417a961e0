package policy

import (
	"fmt"
	"strings"

	"github.com/distribution/reference"
)

// Types of signedIdentity.
const (
	matchExact             = "matchExact"
	matchRepoDigestOrExact = "matchRepoDigestOrExact"
	matchRepository        = "matchRepository"
	exactReference         = "exactReference"
	exactRepository        = "exactRepository"
	remapIdentity          = "remapIdentity"
)

// identity says which image a signature must name.
type identity struct {
	Type             string `json:"type"`
	DockerReference  string `json:"dockerReference"`
	DockerRepository string `json:"dockerRepository"`
	Prefix           string `json:"prefix"`
	SignedPrefix     string `json:"signedPrefix"`
}

func (i *identity) validate() error {
	want := identity{Type: i.Type}
	switch i.Type {
	case matchExact, matchRepoDigestOrExact, matchRepository:
	case exactReference:
		want.DockerReference = i.DockerReference
		if named, err := parse(i.DockerReference); err != nil || reference.IsNameOnly(named) {
			return fmt.Errorf("signedIdentity: dockerReference %q is not an image with a tag or a digest", i.DockerReference)
		}
	case exactRepository:
		want.DockerRepository = i.DockerRepository
		if named, err := parse(i.DockerRepository); err != nil || !reference.IsNameOnly(named) {
			return fmt.Errorf("signedIdentity: dockerRepository %q is not a repository", i.DockerRepository)
		}
	case remapIdentity:
		want.Prefix, want.SignedPrefix = i.Prefix, i.SignedPrefix
		if i.Prefix == "" || i.SignedPrefix == "" {
			return fmt.Errorf("signedIdentity: %s needs prefix and signedPrefix", i.Type)
		}
	default:
		return fmt.Errorf("signedIdentity: unknown type %q", i.Type)
	}
	if *i != want {
		return fmt.Errorf("signedIdentity: %s has a field of another type", i.Type)
	}
	return nil
}

// matches reports whether a signature that names signed is valid for the image.
func (i *identity) matches(image reference.Named, signed string) bool {
	s, err := parse(signed)
	if err != nil {
		return false
	}
	switch i.Type {
	case matchExact:
		return same(image, s)
	case matchRepository:
		return image.Name() == s.Name()
	case exactReference:
		want, err := parse(i.DockerReference)
		return err == nil && same(want, s)
	case exactRepository:
		want, err := parse(i.DockerRepository)
		return err == nil && want.Name() == s.Name()
	case remapIdentity:
		if image, err = i.remap(image); err != nil {
			return false
		}
	}
	if _, ok := image.(reference.Digested); ok {
		return !reference.IsNameOnly(s) && image.Name() == s.Name()
	}
	return same(image, s)
}

// remap replaces the prefix in an image's name. Images without the prefix stay as they are.
func (i *identity) remap(image reference.Named) (reference.Named, error) {
	rest, ok := strings.CutPrefix(image.Name(), i.Prefix)
	if !ok || rest != "" && rest[0] != '/' {
		return image, nil
	}
	return parse(i.SignedPrefix + strings.TrimPrefix(image.String(), i.Prefix))
}

func parse(name string) (reference.Named, error) { return reference.ParseNormalizedNamed(name) }

// same reports whether two names are equal and have a tag or a digest.
func same(a, b reference.Named) bool {
	return !reference.IsNameOnly(a) && !reference.IsNameOnly(b) && a.String() == b.String()
}
