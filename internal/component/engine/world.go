package engine

// Inspect returns the world of the guest in a code image, from which the caller chooses the Host for Load. It returns
// the same errors as Load for an unusable image.
func Inspect(image []byte) (World, error) {
	img, err := decodeImage(image)
	if err != nil {
		return "", err
	}
	return img.World, nil
}
