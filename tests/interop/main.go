// Command interop checks logs of the appliance with programs that are not the appliance's: it only calls them.
//
//	interop log EXPORT KEYS           an exported log: signatures, tiles, entries, proofs, cosignatures
//	interop receipt RECEIPT LEAF KEYS a receipt and the entry it is for
//	interop agent SOCKET              an SSH agent with one new key, which litewitness needs
//
// KEYS is a file of verifier keys, one a line, of logs and witnesses.  What was checked is printed as JSON; what does
// not hold is printed to standard error, and the exit status is 1.
package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"filippo.io/torchwood"
	formats "github.com/transparency-dev/formats/note"
	"github.com/transparency-dev/formats/proof"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// Result is what was checked.
type Result struct {
	Size    int64               `json:"size"`
	Signed  []string            `json:"signed"`   // the keys that signed the checkpoint, by name and id
	Entries int64               `json:"entries"`  // found in the tree at their index
	Proofs  int                 `json:"proofs"`   // of inclusion and of consistency, made from the tiles
	Cosigns map[string][]string `json:"cosigned"` // files of cosigned checkpoints, and the keys that signed them
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	var result *Result
	var err error
	switch {
	case len(arguments) == 3 && arguments[0] == "log":
		result, err = checkLog(arguments[1], arguments[2])
	case len(arguments) == 4 && arguments[0] == "receipt":
		result, err = checkReceipt(arguments[1], arguments[2], arguments[3])
	case len(arguments) == 2 && arguments[0] == "agent":
		return serveAgent(arguments[1])
	default:
		return errors.New("log EXPORT KEYS | receipt RECEIPT LEAF KEYS | agent SOCKET")
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

func checkLog(directory, keys string) (*Result, error) {
	verifiers, err := readKeys(keys)
	if err != nil {
		return nil, err
	}
	head, signed, err := open(filepath.Join(directory, "checkpoint"), verifiers)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	result := &Result{Size: head.N, Signed: signed, Cosigns: map[string][]string{}}
	tiles, err := torchwood.NewTileFS(os.DirFS(directory))
	if err != nil {
		return nil, err
	}
	// Every hash it returns leads to the root of the checkpoint.
	hashes := torchwood.TileHashReaderWithContext(context.Background(), head.Tree, tiles)
	if root, err := tlog.TreeHash(head.N, hashes); err != nil || root != head.Hash {
		return nil, fmt.Errorf("root of %d entries is %v, signed is %v: %w", head.N, root, head.Hash, err)
	}
	client, err := torchwood.NewClient(tiles)
	if err != nil {
		return nil, err
	}
	for range client.AllEntries(context.Background(), head.Tree, 0) {
		result.Entries++
	}
	if err := client.Err(); err != nil || result.Entries != head.N {
		return nil, fmt.Errorf("%d of %d entries: %w", result.Entries, head.N, err)
	}
	for _, size := range places(head.N) {
		if _, _, err := client.Entry(context.Background(), head.Tree, size-1); err != nil {
			return nil, fmt.Errorf("entry %d: %w", size-1, err)
		}
		if err := checkConsistency(head.Tree, size, tlog.Hash{}, hashes); err != nil {
			return nil, err
		}
		result.Proofs += 2
	}
	// A cosigned checkpoint repeats the log's signature; it is the witness's that counts there.
	witnesses := slices.DeleteFunc(verifiers, func(key note.Verifier) bool { return key.Name() == head.Origin })
	cosigned, err := filepath.Glob(filepath.Join(directory, "witnessed", "*"))
	if err != nil {
		return nil, err
	}
	for _, file := range cosigned {
		older, signed, err := open(file, witnesses)
		var unknown *note.UnverifiedNoteError
		if errors.As(err, &unknown) {
			continue // of a witness that was not named
		}
		if err == nil {
			err = checkConsistency(head.Tree, older.N, older.Hash, hashes)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Base(file), err)
		}
		result.Cosigns[filepath.Base(file)] = signed
		result.Proofs++
	}
	return result, nil
}

func checkReceipt(receipt, leaf, keys string) (*Result, error) {
	verifiers, err := readKeys(keys)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(receipt)
	if err != nil {
		return nil, err
	}
	entry, err := os.ReadFile(leaf)
	if err != nil {
		return nil, err
	}
	var parsed proof.TLogProof
	if err := parsed.Unmarshal(text); err != nil {
		return nil, err
	}
	if !bytes.Equal(parsed.Marshal(), text) {
		return nil, errors.New("the receipt is not as formats/proof writes it")
	}
	head, signed, err := openNote(parsed.Checkpoint, verifiers)
	if err != nil {
		return nil, err
	}
	path := make(tlog.RecordProof, len(parsed.Hashes))
	for at, hash := range parsed.Hashes {
		path[at] = hash
	}
	err = tlog.CheckRecord(path, head.N, head.Hash, int64(parsed.Index), tlog.RecordHash(entry))
	if err != nil {
		return nil, err
	}
	return &Result{Size: head.N, Signed: signed, Entries: 1, Proofs: 1}, nil
}

// serveAgent prints the key's fingerprint and answers until it is ended.
func serveAgent(socket string) error {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		return err
	}
	keyring := agent.NewKeyring()
	if err := keyring.Add(agent.AddedKey{PrivateKey: private}); err != nil {
		return err
	}
	sshKey, err := ssh.NewPublicKey(public)
	if err != nil {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	fmt.Println(ssh.FingerprintSHA256(sshKey))
	for {
		connection, err := listener.Accept()
		if err != nil {
			return err
		}
		go agent.ServeAgent(keyring, connection)
	}
}

// places returns sizes of trees at the ends and at borders of tiles, up to size.
func places(size int64) []int64 {
	var found []int64
	for _, border := range []int64{1, 256, 512, 256 * 256, size} {
		for _, at := range []int64{border - 1, border, border + 1} {
			if 1 <= at && at <= size {
				found = append(found, at)
			}
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// checkConsistency proves that the tree continues its first entries, whose root is wanted unless that is zero.
func checkConsistency(tree tlog.Tree, size int64, wanted tlog.Hash, hashes tlog.HashReader) error {
	if size > tree.N {
		return fmt.Errorf("a checkpoint of %d entries is newer than the log of %d", size, tree.N)
	}
	root, err := tlog.TreeHash(size, hashes)
	if err != nil {
		return err
	}
	if wanted == (tlog.Hash{}) {
		wanted = root
	}
	path, err := tlog.ProveTree(tree.N, size, hashes)
	if err != nil {
		return err
	}
	return tlog.CheckTree(path, tree.N, tree.Hash, size, wanted)
}

func open(file string, verifiers []note.Verifier) (torchwood.Checkpoint, []string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return torchwood.Checkpoint{}, nil, err
	}
	return openNote(text, verifiers)
}

// openNote fails if no key of the list signed, or one signed wrongly; other signatures are ignored.
func openNote(text []byte, verifiers []note.Verifier) (torchwood.Checkpoint, []string, error) {
	opened, err := note.Open(text, note.VerifierList(verifiers...))
	if err != nil {
		return torchwood.Checkpoint{}, nil, err
	}
	var signed []string
	for _, signature := range opened.Sigs {
		signed = append(signed, fmt.Sprintf("%s+%08x", signature.Name, signature.Hash))
	}
	slices.Sort(signed)
	head, err := torchwood.ParseCheckpoint(opened.Text)
	return head, signed, err
}

func readKeys(file string) ([]note.Verifier, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var verifiers []note.Verifier
	for _, line := range strings.Fields(string(text)) {
		verifier, err := formats.NewVerifier(line) // Ed25519 and ML-DSA-44, of logs and of witnesses
		if err != nil {
			return nil, fmt.Errorf("%s: %w", line, err)
		}
		verifiers = append(verifiers, verifier)
	}
	return verifiers, nil
}
