// A text to begin with, and questions about it: the last has no answer in the text.

export const NAME = "Titan";

export const TEXT = `In 1655 the Dutch astronomer Christiaan Huygens discovered Titan, the largest moon of Saturn, with a telescope that he and his brother Constantijn had built. It took almost three centuries until Gerard Kuiper found, in 1944, that Titan has an atmosphere.

The probe Huygens, carried there by the spacecraft Cassini, landed on it on 14 January 2005 and sent pictures of a plain strewn with pebbles of ice. It sent data for about ninety minutes after the landing.

Titan has lakes, the only ones known beyond the Earth. They are filled with liquid methane and ethane, and the largest of them, Kraken Mare, is larger than the Caspian Sea. In 2028 a nuclear-powered drone called Dragonfly is to leave for Titan, where it will fly from place to place and look for the chemistry from which life could begin.`;

export const QUESTIONS = ["When did the probe land on Titan?", "How long did it send data?", "Who discovered Enceladus?"];
