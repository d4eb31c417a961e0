package policy

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/ProtonMail/go-crypto/openpgp"
)

// maxSignature limits the bytes of one signature.
const maxSignature = 4 << 20

// readKeyRing reads OpenPGP keys, armored or not.
func readKeyRing(files [][]byte) (openpgp.EntityList, error) {
	var ring openpgp.EntityList
	for _, file := range files {
		keys, err := openpgp.ReadKeyRing(bytes.NewReader(file))
		if err != nil {
			if keys, err = openpgp.ReadArmoredKeyRing(bytes.NewReader(file)); err != nil {
				return nil, fmt.Errorf("key: not OpenPGP: %w", err)
			}
		}
		ring = append(ring, keys...)
	}
	if len(ring) == 0 {
		return nil, errors.New("key: the file has none")
	}
	return ring, nil
}

// verifyMessage returns the content of a signed OpenPGP message. The signature must be by one of the keys, and neither
// the key nor the signature may have expired.
func verifyMessage(ring openpgp.EntityList, message []byte) ([]byte, error) {
	md, err := openpgp.ReadMessage(bytes.NewReader(message), ring, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("not a signed OpenPGP message: %w", err)
	}
	if !md.IsSigned || md.IsEncrypted || md.IsSymmetricallyEncrypted {
		return nil, errors.New("not a signed OpenPGP message")
	}
	content, err := io.ReadAll(io.LimitReader(md.UnverifiedBody, maxSignature))
	if err != nil {
		return nil, fmt.Errorf("not a signed OpenPGP message: %w", err)
	}
	if md.SignedBy == nil {
		return nil, fmt.Errorf("it was made with the unknown key %X", md.SignedByKeyId)
	}
	if md.SignatureError != nil || md.Signature == nil {
		return nil, fmt.Errorf("it is invalid: %w", errors.Join(md.SignatureError))
	}
	return content, nil
}
