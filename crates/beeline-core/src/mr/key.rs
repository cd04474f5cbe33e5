//! Keys that cannot be guessed and are never given out twice.
//!
//! A key is 32 bits on the wire. Inside it stand a slot of the region table and the slot's
//! generation, so a key whose region is gone is recognised as stale rather than taken for the
//! region that lives in the slot now. Both are passed through a secret permutation: a peer that was
//! given one key learns nothing about the next.

use core::fmt;

macro_rules! key {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);

        impl $name {
            /// Wraps a raw key.
            pub const fn new(raw: u32) -> Self {
                Self(raw)
            }

            /// The raw key, as it stands in a header.
            pub const fn as_u32(self) -> u32 {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#010x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#010x}", self.0)
            }
        }
    };
}

key! {
    /// A local key: names a region in a scatter/gather list of this side.
    Lkey
}
key! {
    /// A remote key: the capability a peer presents to reach a region of this side.
    Rkey
}

/// A place in the region table together with the life of that place it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId {
    pub(super) slot: u16,
    pub(super) generation: u16,
}

impl RegionId {
    /// The slot, an index below [`super::REGIONS_MAX`]; a slot is shared over time by its generations.
    pub const fn slot(self) -> usize {
        self.slot as usize
    }

    /// The life of the slot that is meant.
    pub const fn generation(self) -> u16 {
        self.generation
    }
}

/// The secret permutation between [`RegionId`] and the 32 bits of a key.
///
/// A four-round Feistel network over two 16-bit halves with SipHash-2-4 as its round function.
#[derive(Clone)]
pub(super) struct KeyCipher {
    secret: Secret,
}

impl KeyCipher {
    pub(super) const fn new(secret: Secret) -> Self {
        Self { secret }
    }

    pub(super) fn seal(&self, id: RegionId) -> u32 {
        let (mut left, mut right) = (id.slot, id.generation);
        for round in 0..4 {
            (left, right) = (right, left ^ self.round(round, right));
        }
        (u32::from(left) << 16) | u32::from(right)
    }

    pub(super) fn open(&self, key: u32) -> RegionId {
        let (mut left, mut right) = ((key >> 16) as u16, key as u16);
        for round in (0..4).rev() {
            (left, right) = (right ^ self.round(round, left), left);
        }
        RegionId { slot: left, generation: right }
    }

    fn round(&self, round: u64, half: u16) -> u16 {
        self.secret.mix((round << 16) | u64::from(half)) as u16
    }
}

/// 128 secret bits from the operating system's generator, and what is derived from them.
///
/// Core draws no randomness of its own: the caller passes the bits in, and the same bits give the
/// same keys and queue pair numbers, which is what makes a simulated run repeatable.
#[derive(Clone)]
pub struct Secret([u64; 2]);

impl Secret {
    /// A secret of these bits.
    pub const fn new(bits: [u64; 2]) -> Self {
        Self(bits)
    }

    /// SipHash-2-4 of one word under this secret.
    pub fn mix(&self, word: u64) -> u64 {
        let [k0, k1] = self.0;
        let mut v = [
            k0 ^ 0x736f_6d65_7073_6575,
            k1 ^ 0x646f_7261_6e64_6f6d,
            k0 ^ 0x6c79_6765_6e65_7261,
            k1 ^ 0x7465_6462_7974_6573,
        ];
        // One message word, then the closing word that holds the length in its top byte.
        for block in [word, 8 << 56] {
            v[3] ^= block;
            sip_round(&mut v);
            sip_round(&mut v);
            v[0] ^= block;
        }
        v[2] ^= 0xff;
        for _ in 0..4 {
            sip_round(&mut v);
        }
        v[0] ^ v[1] ^ v[2] ^ v[3]
    }

    /// An independent secret for the purpose named by `label`.
    pub fn derive(&self, label: u32) -> Self {
        let base = u64::from(label) << 32;
        Self([self.mix(base | 0xd0), self.mix(base | 0xd1)])
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn sip_round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mixer_is_siphash_2_4() {
        // The published vector set: key 00..0f, message 00..07.
        let secret = Secret::new([0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908]);
        assert_eq!(secret.mix(0x0706_0504_0302_0100), 0x93f5_f579_9a93_2462);
    }

    #[test]
    fn every_key_opens_to_what_was_sealed() {
        let cipher = KeyCipher::new(Secret::new([1, 2]));
        for slot in (0..=u16::MAX).step_by(257) {
            for generation in (0..=u16::MAX).step_by(509) {
                let id = RegionId { slot, generation };
                assert_eq!(cipher.open(cipher.seal(id)), id);
            }
        }
    }

    #[test]
    fn neighbouring_regions_have_unrelated_keys() {
        let cipher = KeyCipher::new(Secret::new([3, 4]));
        let keys = |slot| cipher.seal(RegionId { slot, generation: 1 });
        for slot in 0..1000 {
            let difference = keys(slot) ^ keys(slot + 1);
            assert!(difference.count_ones() > 3, "slot {slot}: {difference:#x}");
        }
    }
}
