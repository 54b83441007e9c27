//! The JSON structure of responses, of chunks of streamed responses, and of their choices.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::array::ResponseError;
use super::routed_experts::RoutedExperts;

/// Maximum number of choices of a response: prompts × choices per prompt.
const MAX_CHOICES: usize = 1 << 14;
/// Maximum number of responses and choices in a list of responses.
const MAX_LISTED: usize = 1 << 17;

/// A response, a chunk of a streamed response, or a choice. Each of them may contain routing under the same keys.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Response {
    pub(super) id: Option<Id>,
    pub(super) object: Option<String>,
    /// Index of a choice.
    pub(super) index: Option<u64>,
    pub(super) prompt_routed_experts: Option<RoutedExperts>,
    pub(super) routed_experts: Option<RoutedExperts>,
    pub(super) sglext: Option<Extension>,
    pub(super) sgl_ext: Option<Extension>,
    pub(super) meta_info: Option<Extension>,
    #[serde(deserialize_with = "choices")]
    pub(super) choices: Option<Vec<Response>>,
    pub(super) usage: Option<Extension>,
}

/// An extension object of SGLang, or the `usage` of a response.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Extension {
    pub(super) id: Option<Id>,
    pub(super) prompt_tokens: Option<usize>,
    pub(super) completion_tokens: Option<usize>,
    pub(super) routed_experts_start_len: Option<usize>,
    pub(super) routed_experts: Option<RoutedExperts>,
}

/// Identifier of a response: a string or a number.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Id(String);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrNumber;

        impl Visitor<'_> for TextOrNumber {
            type Value = Id;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an id (a string or a number)")
            }

            fn visit_str<E>(self, text: &str) -> Result<Id, E> {
                Ok(Id(text.to_owned()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Id, E> {
                Ok(Id(number.to_string()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Id, E> {
                Ok(Id(number.to_string()))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Id, E> {
                Ok(Id(number.to_string()))
            }
        }

        deserializer.deserialize_any(TextOrNumber)
    }
}

/// The choices of a response. Nested choices have no meaning and are dropped.
fn choices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Response>>, D::Error> {
    struct Choices;

    impl<'de> Visitor<'de> for Choices {
        type Value = Option<Vec<Response>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of choices")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut choices = Vec::new();
            while let Some(choice) = list.next_element()? {
                if choices.len() >= MAX_CHOICES {
                    return Err(too_many(MAX_CHOICES, "choices of a response"));
                }
                choices.push(Response {
                    choices: None,
                    ..choice
                });
            }
            Ok(Some(choices))
        }
    }

    deserializer.deserialize_any(Choices)
}

fn too_many<E: de::Error>(limit: usize, what: &str) -> E {
    E::custom(format_args!("there are more than {limit} {what}"))
}

/// A response, or the list of responses to a request with several prompts.
pub(super) enum Batch {
    One(Box<Response>),
    Many(Vec<Response>),
}

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany;

        impl<'de> Visitor<'de> for OneOrMany {
            type Value = Batch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a response, or a list of responses")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Batch, A::Error> {
                let response = Box::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Batch::One(response))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Batch, A::Error> {
                let (mut responses, mut n_listed) = (Vec::new(), 0);
                while let Some(response) = list.next_element::<Response>()? {
                    n_listed += 1 + response.choices.as_ref().map_or(0, Vec::len);
                    if n_listed > MAX_LISTED {
                        return Err(too_many(MAX_LISTED, "responses and choices in a list"));
                    }
                    responses.push(response);
                }
                Ok(Batch::Many(responses))
            }
        }

        deserializer.deserialize_any(OneOrMany)
    }
}

impl Response {
    /// The first extension object with routing, and its key.
    pub(super) fn extension(&self) -> Option<(&'static str, &Extension)> {
        let objects = [
            ("sglext", &self.sglext),
            ("sgl_ext", &self.sgl_ext),
            ("meta_info", &self.meta_info),
        ];
        let mut present = objects
            .into_iter()
            .filter_map(|(key, object)| Some((key, object.as_ref()?)));
        present.find(|(_, object)| object.routed_experts.is_some())
    }

    /// Identifier of the response that a chunk belongs to.
    pub(super) fn id(&self) -> Option<&Id> {
        let of_meta_info = || self.meta_info.as_ref()?.id.as_ref();
        self.id.as_ref().or_else(of_meta_info)
    }

    pub(super) fn is_chunk(&self) -> bool {
        let object = self.object.as_deref();
        object.is_some_and(|object| object.ends_with(".chunk"))
    }

    /// Merges a later chunk.
    ///
    /// # Errors
    /// [`ResponseError::Choices`] if there are more than [`MAX_CHOICES`].
    pub(super) fn merge(&mut self, later: Response) -> Result<(), ResponseError> {
        replace(&mut self.prompt_routed_experts, later.prompt_routed_experts);
        replace(&mut self.routed_experts, later.routed_experts);
        replace(&mut self.sglext, later.sglext);
        replace(&mut self.sgl_ext, later.sgl_ext);
        replace(&mut self.meta_info, later.meta_info);
        replace(&mut self.usage, later.usage);
        let choices = self.choices.get_or_insert_default();
        for later in later.choices.into_iter().flatten() {
            match choices
                .iter_mut()
                .find(|choice| choice.index == later.index)
            {
                Some(choice) => choice.merge(later)?,
                None => {
                    if choices.len() >= MAX_CHOICES {
                        return Err(ResponseError::Choices { limit: MAX_CHOICES });
                    }
                    choices.push(later);
                }
            }
        }
        Ok(())
    }
}

fn replace<T>(value: &mut Option<T>, later: Option<T>) {
    if later.is_some() {
        *value = later;
    }
}
