//! SHA-256 (FIPS 180-4) and HMAC (RFC 2104), by which ranks prove that they have the same unique identifier.

/// Bytes of a digest.
pub(super) const DIGEST: usize = 32;

/// HMAC-SHA-256 over the parts, one after the other.
pub(super) fn hmac(key: &[u8; DIGEST], parts: &[&[u8]]) -> [u8; DIGEST] {
    let pad = |byte: u8| {
        let mut block = [byte; BLOCK];
        for (into, from) in block.iter_mut().zip(key) {
            *into ^= from;
        }
        block
    };
    let mut inner = Sha256::new();
    inner.update(&pad(0x36));
    for part in parts {
        inner.update(part);
    }
    let mut outer = Sha256::new();
    outer.update(&pad(0x5c));
    outer.update(&inner.finish());
    outer.finish()
}

/// Whether two digests are equal, in a time that does not depend on where they differ.
pub(super) fn equal(a: &[u8; DIGEST], b: &[u8; DIGEST]) -> bool {
    a.iter().zip(b).fold(0, |differ, (x, y)| differ | (x ^ y)) == 0
}

const BLOCK: usize = 64;

pub(super) struct Sha256 {
    state: [u32; 8],
    pending: [u8; BLOCK],
    len: u64,
}

impl Sha256 {
    pub(super) const fn new() -> Self {
        Self { state: INITIAL, pending: [0; BLOCK], len: 0 }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let at = (self.len % BLOCK as u64) as usize;
            self.pending[at] = *byte;
            self.len += 1;
            if at == BLOCK - 1 {
                self.compress();
            }
        }
    }

    pub(super) fn finish(mut self) -> [u8; DIGEST] {
        let bits = self.len * 8;
        self.update(&[0x80]);
        while self.len % BLOCK as u64 != 56 {
            self.update(&[0]);
        }
        self.update(&bits.to_be_bytes());
        let mut digest = [0; DIGEST];
        for (into, word) in digest.as_chunks_mut::<4>().0.iter_mut().zip(self.state) {
            *into = word.to_be_bytes();
        }
        digest
    }

    fn compress(&mut self) {
        let mut w = [0_u32; 64];
        for (word, bytes) in w.iter_mut().zip(self.pending.as_chunks::<4>().0) {
            *word = u32::from_be_bytes(*bytes);
        }
        for t in 16..64 {
            let (x, y) = (w[t - 15], w[t - 2]);
            let s0 = x.rotate_right(7) ^ x.rotate_right(18) ^ (x >> 3);
            let s1 = y.rotate_right(17) ^ y.rotate_right(19) ^ (y >> 10);
            w[t] = w[t - 16].wrapping_add(s0).wrapping_add(w[t - 7]).wrapping_add(s1);
        }
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = self.state;
        for (k, w) in ROUND.iter().zip(w) {
            let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let t1 = h.wrapping_add(s1).wrapping_add((e & f) ^ (!e & g));
            let t1 = t1.wrapping_add(*k).wrapping_add(w);
            let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let t2 = s0.wrapping_add((a & b) ^ (a & c) ^ (b & c));
            (h, g, f, e) = (g, f, e, d.wrapping_add(t1));
            (d, c, b, a) = (c, b, a, t1.wrapping_add(t2));
        }
        for (state, add) in self.state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
            *state = state.wrapping_add(add);
        }
    }
}

const INITIAL: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// First 32 bits of the fractions of the cube roots of the first 64 primes.
#[rustfmt::skip]
const ROUND: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
];

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
