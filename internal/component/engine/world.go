package engine

// Inspect tells what the guest of a code image is made for, before Load, which must be given the host of that world. Its
// errors are those of Load.
func Inspect(image []byte) (World, error) {
	img, err := decodeImage(image)
	if err != nil {
		return "", err
	}
	return img.World, nil
}
