//! Messages of the output plugin `pgoutput`, protocol 1, as far as inserts into `events` need them.
//!
//! Source: "Logical Replication Message Formats" of the manual. Columns are found by name (H21): a column added later
//! changes nothing, one that is missing or of another type is an error, and so is a message that is cut off. Pure.

use std::collections::HashMap;

use time::OffsetDateTime;
use tokio_postgres::types::{FromSql, Json, Type};

use super::super::confirm::headers;
use crate::db::Names;
use crate::error::{Error, Result};
use crate::event::{Event, Payload, PayloadFormat};

/// The columns of `events` that matter here, in the order of the constants below.
const COLUMNS: [(&str, Type); 10] = [
    ("seq", Type::INT8),
    ("created_at", Type::TIMESTAMPTZ),
    ("lane", Type::INT2),
    ("handlers", Type::INT4_ARRAY),
    ("format", Type::CHAR),
    ("id", Type::TEXT),
    ("type", Type::TEXT),
    ("key", Type::TEXT),
    ("headers", Type::JSONB),
    ("payload", Type::BYTEA),
];
const SEQ: usize = 0;
const CREATED_AT: usize = 1;
const LANE: usize = 2;
const HANDLERS: usize = 3;
const FORMAT: usize = 4;
const ID: usize = 5;
const KIND: usize = 6;
const KEY: usize = 7;
const HEADERS: usize = 8;
const PAYLOAD: usize = 9;

/// One message, as far as it matters here.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one a row, taken apart at once")]
pub(super) enum Message<'a> {
    Begin {
        xid: u32,
        /// By the server's clock.
        committed_at: OffsetDateTime,
    },
    Commit,
    Insert(Insert<'a>),
    /// A relation, a type, an origin: taken note of, or of no interest.
    Other,
}

/// An inserted row of `events`, its payload not looked at yet.
#[derive(Debug)]
pub(super) struct Insert<'a> {
    pub(super) seq: i64,
    pub(super) created_at: OffsetDateTime,
    pub(super) lane: i16,
    pub(super) handlers: Vec<i32>,
    values: [Option<&'a [u8]>; COLUMNS.len()],
}

/// Remembers the relations of one stream.
#[derive(Debug)]
pub(super) struct Decoder {
    schema: String,
    table: String,
    /// By the server's number: where each of [`COLUMNS`] is, and how many columns there are. `None`: another table,
    /// which somebody added to the publication.
    relations: HashMap<u32, Option<([usize; COLUMNS.len()], usize)>>,
}

impl Decoder {
    pub(super) fn new(names: &Names) -> Self {
        let (schema, table) = (names.schema().to_owned(), format!("{}events", names.prefix()));
        Self { schema, table, relations: HashMap::new() }
    }

    /// # Errors
    /// A message that is cut off, or not what this bridge can read; the stream cannot be gone on with.
    pub(super) fn read<'a>(&mut self, message: &'a [u8]) -> Result<Message<'a>> {
        let mut reader = Reader(message);
        match reader.u8()? {
            b'B' => {
                reader.take(8)?;
                let committed_at = timestamp(reader.i64()?)?;
                Ok(Message::Begin { xid: reader.u32()?, committed_at })
            }
            b'C' => Ok(Message::Commit),
            b'R' => {
                self.relation(&mut reader)?;
                Ok(Message::Other)
            }
            b'I' => Ok(self.insert(&mut reader)?.map_or(Message::Other, Message::Insert)),
            // Type, origin, truncate, message; updates and deletes are not published.
            b'Y' | b'O' | b'T' | b'M' | b'U' | b'D' => Ok(Message::Other),
            other => Err(Error::transient(format!("the stream holds a message of unknown kind {other:#04x}"))),
        }
    }

    fn relation(&mut self, reader: &mut Reader<'_>) -> Result<()> {
        let number = reader.u32()?;
        let schema = reader.text()?;
        let table = reader.text()?;
        if schema != self.schema || table != self.table {
            self.relations.insert(number, None);
            return Ok(());
        }
        let _replica_identity = reader.u8()?;
        let count = usize::from(reader.u16()?);
        let mut places = [usize::MAX; COLUMNS.len()];
        for place in 0..count {
            let _flags = reader.u8()?;
            let name = reader.text()?;
            let kind = reader.u32()?;
            let _modifier = reader.u32()?;
            let Some(column) = COLUMNS.iter().position(|(column, _)| *column == name) else { continue };
            if kind != COLUMNS[column].1.oid() {
                return Err(Error::new(format!("column {name} of {table} has a type that this bridge cannot read"))
                    .hint("this bridge and the schema do not fit; see: lanebridge migrate --status"));
            }
            places[column] = place;
        }
        if let Some(missing) = places.iter().position(|place| *place == usize::MAX) {
            return Err(Error::new(format!("the stream of {table} has no column {}", COLUMNS[missing].0))
                .hint("the publication must not list columns"));
        }
        self.relations.insert(number, Some((places, count)));
        Ok(())
    }

    fn insert<'a>(&self, reader: &mut Reader<'a>) -> Result<Option<Insert<'a>>> {
        let number = reader.u32()?;
        let known = self.relations.get(&number);
        let Some((places, count)) =
            known.ok_or_else(|| Error::transient("the stream has a row of an unknown table"))?
        else {
            return Ok(None);
        };
        if reader.u8()? != b'N' {
            return Err(Error::transient("the stream has an insert without a new row"));
        }
        if usize::from(reader.u16()?) != *count {
            return Err(Error::transient("the stream has a row with another number of columns than its table"));
        }
        let mut values = [None; COLUMNS.len()];
        for place in 0..*count {
            let value = match reader.u8()? {
                b'n' => None,
                b'b' => {
                    let length = reader.length()?;
                    Some(reader.take(length)?)
                }
                // A value that was not sent, or one as text although binary was asked for.
                other => {
                    return Err(Error::transient(format!("the stream has a column of kind {:?}", char::from(other))));
                }
            };
            if let Some(column) = places.iter().position(|wanted| *wanted == place) {
                values[column] = value;
            }
        }
        Ok(Some(Insert {
            seq: needed(&values, SEQ)?,
            created_at: timestamp(needed(&values, CREATED_AT)?)?,
            lane: needed(&values, LANE)?,
            handlers: needed(&values, HANDLERS)?,
            values,
        }))
    }
}

impl Insert<'_> {
    /// The whole event, as a read of the table would give it.
    ///
    /// # Errors
    /// A value that is not what its type says, or that a sink could not be given.
    pub(super) fn event(&self) -> Result<Event> {
        let format = PayloadFormat::from_code(needed(&self.values, FORMAT)?)
            .ok_or_else(|| Error::transient("the stream has an event of unknown format"))?;
        Ok(Event {
            seq: self.seq,
            id: needed(&self.values, ID)?,
            kind: needed(&self.values, KIND)?,
            key: optional(&self.values, KEY)?,
            headers: optional::<Json<serde_json::Map<_, _>>>(&self.values, HEADERS)?
                .map(|Json(map)| headers(map))
                .unwrap_or_default(),
            payload: Payload { bytes: needed(&self.values, PAYLOAD)?, format },
            created_at: self.created_at,
        })
    }

    /// What the row takes on the wire, about what its event takes in memory.
    pub(super) fn size_bytes(&self) -> usize {
        self.values.iter().flatten().map(|value| value.len()).sum()
    }
}

fn optional<'a, T: FromSql<'a>>(values: &[Option<&'a [u8]>; COLUMNS.len()], column: usize) -> Result<Option<T>> {
    let (name, kind) = &COLUMNS[column];
    // What is wrong with it is not said: that could quote the value.
    let bad = |_| Error::transient(format!("column {name} of the stream is not what its type says"));
    values[column].map(|value| T::from_sql(kind, value).map_err(bad)).transpose()
}

fn needed<'a, T: FromSql<'a>>(values: &[Option<&'a [u8]>; COLUMNS.len()], column: usize) -> Result<T> {
    optional(values, column)?
        .ok_or_else(|| Error::transient(format!("column {} of the stream is null", COLUMNS[column].0)))
}

/// Microseconds since 2000 as a time. Checked: the years of Postgres go further than those of a calendar here.
fn timestamp(micros: i64) -> Result<OffsetDateTime> {
    const EPOCH_MICROS: i128 = 946_684_800_000_000;
    OffsetDateTime::from_unix_timestamp_nanos((i128::from(micros) + EPOCH_MICROS) * 1000)
        .map_err(|_| Error::transient("the stream has an event of a year that is no date here"))
}

/// Reads big-endian numbers and texts; what is cut off is an error.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self
            .0
            .split_at_checked(count)
            .ok_or_else(|| Error::transient("the stream has a message that is cut off"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| Error::transient("the stream has a message that is cut off"))
    }

    fn u8(&mut self) -> Result<u8> {
        self.array().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn i64(&mut self) -> Result<i64> {
        self.array().map(i64::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn length(&mut self) -> Result<usize> {
        usize::try_from(self.u32()?).map_err(|_| Error::transient("the stream has a value that is too long"))
    }

    /// Up to the next NUL.
    fn text(&mut self) -> Result<&'a str> {
        let end = self.0.iter().position(|byte| *byte == 0);
        let end = end.ok_or_else(|| Error::transient("the stream has a name that is cut off"))?;
        let text = self.take(end)?;
        self.take(1)?;
        std::str::from_utf8(text)
            .map_err(|source| Error::transient("the stream has a name that is no text").source_is(source))
    }
}

#[cfg(test)]
mod tests {
    use bytes::{BufMut, BytesMut};
    use proptest::prelude::*;

    use super::*;

    /// Column name, type and value as the server would send them.
    type Column = (&'static str, u32, Option<Vec<u8>>);

    fn row() -> Vec<Column> {
        let handlers = [1_i32, 0, 23, 2, 1, 4, 7, 4, 9].iter().flat_map(|n| n.to_be_bytes()).collect();
        let mut headers = vec![1];
        headers.extend_from_slice(br#"{"a": "b", "n": 1}"#);
        vec![
            ("seq", 20, Some(5_i64.to_be_bytes().to_vec())),
            ("created_at", 1184, Some(1_000_000_i64.to_be_bytes().to_vec())),
            ("lane", 21, Some(3_i16.to_be_bytes().to_vec())),
            ("format", 18, Some(vec![b'j'])),
            ("id", 25, Some(b"id-1".to_vec())),
            ("type", 25, Some(b"order.placed".to_vec())),
            ("key", 25, None),
            ("headers", 3802, Some(headers)),
            ("handlers", 1007, Some(handlers)),
            ("payload", 17, Some(b"{}".to_vec())),
        ]
    }

    fn relation(columns: &[Column]) -> Vec<u8> {
        let mut out = BytesMut::new();
        out.put_slice(b"R\0\0\0\x2apublic\0events\0d");
        out.put_u16(columns.len().try_into().unwrap());
        for (name, kind, _) in columns {
            out.put_u8(0);
            out.put_slice(name.as_bytes());
            out.put_u8(0);
            out.put_u32(*kind);
            out.put_u32(u32::MAX);
        }
        out.to_vec()
    }

    fn insert(columns: &[Column]) -> Vec<u8> {
        let mut out = BytesMut::new();
        out.put_slice(b"I\0\0\0\x2aN");
        out.put_u16(columns.len().try_into().unwrap());
        for (_, _, value) in columns {
            match value {
                None => out.put_u8(b'n'),
                Some(value) => {
                    out.put_u8(b'b');
                    out.put_u32(value.len().try_into().unwrap());
                    out.put_slice(value);
                }
            }
        }
        out.to_vec()
    }

    fn fresh() -> Decoder {
        Decoder { schema: "public".into(), table: "events".into(), relations: HashMap::new() }
    }

    fn decode(columns: &[Column]) -> Result<Event> {
        let mut decoder = fresh();
        decoder.read(&relation(columns))?;
        let message = insert(columns);
        match decoder.read(&message)? {
            Message::Insert(insert) => insert.event(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_beginning_of_a_transaction_says_when_it_was_committed() {
        let mut message = b"B\0\0\0\0\0\0\0\x09".to_vec();
        message.extend(1_000_000_i64.to_be_bytes());
        message.extend(7_u32.to_be_bytes());
        let Message::Begin { xid, committed_at } = fresh().read(&message).unwrap() else { panic!("a beginning") };
        assert_eq!((xid, committed_at.unix_timestamp()), (7, 946_684_801));
    }

    // H21.
    #[test]
    fn columns_are_found_by_name_in_any_order_and_more_of_them_change_nothing() {
        let mut columns = row();
        let event = decode(&columns).unwrap();
        assert_eq!((event.seq, event.id.as_str(), event.kind.as_str()), (5, "id-1", "order.placed"));
        assert_eq!(event.created_at.unix_timestamp(), 946_684_801);
        assert_eq!(event.headers, [("a".to_owned(), "b".to_owned()), ("n".to_owned(), "1".to_owned())]);
        assert_eq!((event.key, event.payload.bytes), (None, b"{}".to_vec()));
        columns.reverse();
        columns.insert(4, ("later", 25, Some(b"x".to_vec())));
        assert_eq!(decode(&columns).unwrap().id, "id-1");
        let mut decoder = fresh();
        decoder.read(&relation(&columns)).unwrap();
        let message = insert(&columns);
        let Message::Insert(insert) = decoder.read(&message).unwrap() else { panic!("an insert") };
        assert_eq!((insert.lane, insert.handlers), (3, vec![7, 9]));
    }

    #[test]
    fn what_does_not_fit_is_an_error_that_names_the_column() {
        for (name, kind) in [("seq", 23), ("payload", 25)] {
            let mut columns = row();
            columns.iter_mut().find(|column| column.0 == name).unwrap().1 = kind;
            assert!(decode(&columns).unwrap_err().report().contains(&format!("column {name}")));
            let mut columns = row();
            columns.retain(|column| column.0 != name);
            assert!(decode(&columns).unwrap_err().report().contains(&format!("no column {name}")));
            let mut columns = row();
            columns.iter_mut().find(|column| column.0 == name).unwrap().2 = None;
            assert!(decode(&columns).unwrap_err().report().contains(&format!("column {name} of the stream is null")));
        }
        let mut infinite = row();
        infinite[1].2 = Some(i64::MAX.to_be_bytes().to_vec());
        assert!(decode(&infinite).unwrap_err().report().contains("no date"));
    }

    #[test]
    fn rows_of_another_table_in_the_publication_are_passed_over() {
        let mut decoder = Decoder { table: "others".into(), ..fresh() };
        decoder.read(&relation(&row()[..2])).unwrap();
        assert!(matches!(decoder.read(&insert(&row()[..2])).unwrap(), Message::Other));
    }

    #[test]
    fn a_row_of_a_table_nobody_described_is_an_error() {
        assert!(fresh().read(&insert(&row())).unwrap_err().report().contains("unknown table"));
    }

    proptest! {
        // Whatever the bytes are, the answer is a message or an error: no panic, no endless loop.
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0_usize..8) {
            let mut decoder = fresh();
            decoder.read(&relation(&row())).unwrap();
            let mut message = vec![b"BCRIYOTX"[kind]];
            message.extend(&bytes);
            if let Ok(Message::Insert(insert)) = decoder.read(&message) {
                let _event = insert.event();
            }
        }

        #[test]
        fn a_message_that_is_cut_or_changed_somewhere_is_a_message_or_an_error(cut in any::<prop::sample::Index>(),
                at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let whole = insert(&row());
            let mut decoder = fresh();
            decoder.read(&relation(&row())).unwrap();
            let cut = cut.index(whole.len());
            prop_assert!(decoder.read(&whole[..cut]).is_err());
            let mut changed = whole.clone();
            changed[at.index(whole.len())] = byte;
            if let Ok(Message::Insert(insert)) = decoder.read(&changed) {
                let _event = insert.event();
            }
            let mut described = relation(&row());
            let place = at.index(described.len());
            described[place] = byte;
            let _read = fresh().read(&described);
        }
    }
}
