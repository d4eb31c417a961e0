package channel

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/containerd/errdefs"
)

// maxName is the length of a file's name in bytes.
const maxName = 255

// Channel is a channel that a module may open under a name.
type Channel struct {
	// Name is the file's name in the guest's /ch; "stdin", "stdout" and "stderr" stand for these streams.
	Name string `json:"name"`
	// Topic is the topic or, of a channel that is only read, the filter.
	Topic string `json:"topic"`
	// Flags are the widest mode in which the channel may be opened.
	Flags Flags `json:"flags"`
}

// Validate checks the channels of one module. Errors are errdefs.ErrInvalidArgument and name the channel.
func Validate(all []Channel) error {
	if len(all) > MaxChannels {
		return fmt.Errorf("%d channels: a module may have %d: %w", len(all), MaxChannels, errdefs.ErrInvalidArgument)
	}
	names := map[string]bool{}
	for i, c := range all {
		err := c.validate()
		if err == nil && names[c.Name] {
			err = fmt.Errorf("the name is taken: %w", errdefs.ErrInvalidArgument)
		}
		if err != nil {
			return fmt.Errorf("channel %d (%q): %w", i, c.Name, err)
		}
		names[c.Name] = true
	}
	return nil
}

func (c Channel) validate() error {
	switch {
	case c.Name == "" || c.Name == "." || c.Name == ".." || len(c.Name) > maxName,
		strings.ContainsFunc(c.Name, func(r rune) bool { return r == '/' || unicode.IsControl(r) }):
		return fmt.Errorf("the name is not a file name: %w", errdefs.ErrInvalidArgument)
	case c.Flags > ReadWrite|QoS1|QoS2:
		return fmt.Errorf("the flags %#x have unknown bits: %w", uint8(c.Flags), errdefs.ErrInvalidArgument)
	}
	return validMode(c.Flags, c.Topic)
}

// validMode checks that a channel on the topic may have the flags.
func validMode(flags Flags, topic string) error {
	switch {
	case flags&ReadWrite == 0:
		return fmt.Errorf("the flags %#x on %q ask neither for reading (1) nor for writing (2): %w", uint8(flags), topic, errdefs.ErrInvalidArgument)
	case flags.CanWrite() && HasWildcard(topic):
		return fmt.Errorf("the topic %q has a wildcard, which only a channel that is read and not written may have: %w", topic, errdefs.ErrInvalidArgument)
	}
	return ValidFilter(topic)
}
