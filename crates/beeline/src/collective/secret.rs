//! Digests, by which ranks prove that they have the same unique identifier.

use hmac::{Hmac, Mac};
use sha2::Digest;

/// Bytes of a digest.
pub(super) const DIGEST: usize = 32;

/// HMAC-SHA-256 (RFC 2104) over the parts, one after the other.
pub(super) fn hmac(key: &[u8; DIGEST], parts: &[&[u8]]) -> [u8; DIGEST] {
    let mut mac = Hmac::<sha2::Sha256>::new(&block(key));
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

/// The key as HMAC pads it: of a block's length, so that it cannot be one of a wrong length.
fn block(key: &[u8; DIGEST]) -> hmac::digest::Key<Hmac<sha2::Sha256>> {
    let mut block = hmac::digest::Key::<Hmac<sha2::Sha256>>::default();
    for (into, from) in block.iter_mut().zip(key) {
        *into = *from;
    }
    block
}

/// Whether two digests are equal, in a time that does not depend on where they differ.
pub(super) fn equal(a: &[u8; DIGEST], b: &[u8; DIGEST]) -> bool {
    a.iter().zip(b).fold(0, |differ, (x, y)| differ | (x ^ y)) == 0
}

/// SHA-256 (FIPS 180-4) over what it is given, one after the other.
pub(super) struct Sha256(sha2::Sha256);

impl Sha256 {
    pub(super) fn new() -> Self {
        Self(sha2::Sha256::new())
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn finish(self) -> [u8; DIGEST] {
        self.0.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// FIPS 180-4 examples; RFC 4231 test case 2 with the key padded as HMAC pads it.
    #[test]
    fn published_values() {
        let digest = |text: &[u8]| {
            let mut hash = Sha256::new();
            hash.update(text);
            hex(&hash.finish())
        };
        let cases: [(&[u8], &str); 3] = [
            (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(digest(text), expected);
        }
        let mut key = [0; DIGEST];
        key[..4].copy_from_slice(b"Jefe");
        let mac = hmac(&key, &[b"what do ya want ", b"for nothing?"]);
        assert_eq!(hex(&mac), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        assert!(equal(&mac, &mac) && !equal(&mac, &key));
    }
}
